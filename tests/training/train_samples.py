"""A tiny run: its records, its chat template, and its data packed without Ray."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from mars_ray.data.chat import ChatEncoder, Encoded
from mars_ray.data.packed import PackedWriter, PackReport
from mars_ray.data.packing import Packer
from mars_ray.data.records import parse_record
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.training.config import TrainConfig

MakeConfig = Callable[..., TrainConfig]
RECORDS = [{"prompt": f"count to {n}", "response": " ".join(map(str, range(n)))} for n in range(1, 13)] * 8
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def save_start_model(folder: Path) -> None:
    """Save a model with random weights to train from."""
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        (text for record in RECORDS for text in record.values()),
        vocab_size=270,
        new_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|end|>", "<|endoftext|>", TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def pack(config: TrainConfig, start_model: Path, count: int = len(RECORDS)) -> None:
    """Put `count` records, packed, where a run expects them, without Ray."""
    encoder = ChatEncoder(load_checkpoint(start_model).tokenizer)
    encoded = encoder.encode([parse_record(json.dumps(record).encode()) for record in RECORDS[:count]])
    for name in ("train", "heldout"):
        folder = config.output / "data" / name
        folder.mkdir(parents=True)
        packer, writer = Packer(config.data.length, "drop"), PackedWriter(Path(str(folder)), config.data.length)
        for each in encoded:
            assert isinstance(each, Encoded)
            writer.write(packer.add(each))
        writer.write(packer.finish())
        writer.close(
            PackReport(
                records=count,
                bad_records=0,
                dropped_overlong=packer.dropped,
                truncated=0,
                examples=packer.examples,
                tokens=packer.tokens,
                response_tokens=packer.response_tokens,
                rows=writer.rows,
                length=config.data.length,
                fill=1.0,
                seconds=1.0,
                tokens_per_s=1.0,
            )
        )

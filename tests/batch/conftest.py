"""A tiny real model with a chat template, in a folder and in memory."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from mars_ray.model.checkpoint import Checkpoint, load_checkpoint

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights, 128 positions and a tokenizer of bytes: a prompt has a token per byte and three."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        [""], vocab_size=260, new_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"], show_progress=False
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
        initializer_range=0.5,  # logits that differ, so that no rounding changes which is the largest
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(model_folder: Path) -> Checkpoint:
    """What is in the folder; no test changes it."""
    return load_checkpoint(model_folder)

"""Small real models and a small real tokenizer, saved the way transformers saves them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    TokenizersBackend,
)

ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MakeFolder = Callable[..., Path]
PROMPT = "two plus two is four, and Two plus Three is 5!"


@cache
def trained_tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = ["one", "two", "three", "four", "five", "six", "seven", "plus", "minus", "times", "is", "and", "equals"]
    tokenizer.train_from_iterator([f"{a} {b} {c}" for a in words for b in words for c in words], trainer)
    return tokenizer.to_str()


def tiny_tokenizer() -> TokenizersBackend:
    return TokenizersBackend(
        tokenizer_object=Tokenizer.from_str(trained_tokenizer_json()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )


def tiny_network(architecture: str = "qwen2", *, rows: int = 320, tied: bool = True) -> PreTrainedModel:
    config_class, network_class = ARCHITECTURES[architecture]
    torch.manual_seed(7)
    config = config_class(
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
    )
    return network_class(config).eval()


def logits_of(network: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return network(input_ids=torch.arange(3, 19)[None]).logits


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

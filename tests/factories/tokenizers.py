"""Small real tokenizers, and a folder with one and a network for it."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import Qwen2Tokenizer, TokenizersBackend

from tests.factories.networks import tiny_network

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ROLES = ["<|user|>", "<|assistant|>", "<|end|>"]
ROLES_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_byte_bpe(texts: Iterable[str], special_tokens: Sequence[str], trims_spaces: bool | None = None) -> str:
    """Return the JSON of a tokenizer of 300 tokens; without `trims_spaces` it has no post-processor."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if trims_spaces is not None:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims_spaces)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


@cache
def tiny_tokenizer_json() -> str:
    words = ["one", "two", "three", "four", "five", "six", "seven", "plus", "minus", "times", "is", "and", "equals"]
    return train_byte_bpe([f"{a} {b} {c}" for a in words for b in words for c in words], SPECIAL_TOKENS)


def tiny_tokenizer() -> TokenizersBackend:
    return TokenizersBackend(
        tokenizer_object=Tokenizer.from_str(tiny_tokenizer_json()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )


def save_tiny_model(folder: Path) -> Path:
    """Save the network and the tokenizer for it, which has no chat template."""
    tiny_network().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_chat_model(folder: Path, texts: Iterable[str] = ("",), vocabulary: int = 260, **fields: Any) -> Path:
    """Save a network with random weights and 128 positions, and a tokenizer with a chat template, trained on `texts`.

    Without texts it is a tokenizer of bytes: a prompt has a token per byte and three.
    """
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        iter(texts), vocab_size=vocabulary, new_special_tokens=ROLES, show_progress=False
    )
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|end|>", "<|endoftext|>", ROLES_TEMPLATE
    sizes = {"vocab_size": 288, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    tiny_network(seed=0, eos_token_id=tokenizer.eos_token_id, **(sizes | fields)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

"""A small real tokenizer with a chat template, and examples made by hand."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from tokenizers import Tokenizer
from transformers import TokenizersBackend

from mars_ray.data.chat import Encoded
from mars_ray.data.records import Message
from tests.factories.tokenizers import SPECIAL_TOKENS as CHATML_TOKENS
from tests.factories.tokenizers import train_byte_bpe

ROLE_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
SPECIAL_TOKENS = [*CHATML_TOKENS, *ROLE_TOKENS]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROLES_ARE_TOKENS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def _trained(trims_spaces: bool) -> str:
    return train_byte_bpe(["one two three\n\n\nfour  five\n\nassistant user ééé"] * 9, SPECIAL_TOKENS, trims_spaces)


def make_tokenizer(
    template: str | None = CHATML, *, eos: str | None = "<|im_end|>", trims_spaces: bool = False
) -> TokenizersBackend:
    tokenizer = TokenizersBackend(
        tokenizer_object=Tokenizer.from_str(_trained(trims_spaces)), eos_token=eos, pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents: str) -> tuple[Message, ...]:
    """User and assistant speak in turns."""
    return tuple({"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents))


def example(tokens: Sequence[int], prompt: int = 0) -> Encoded:
    """An example whose first `prompt` tokens are no response."""
    return Encoded(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) >= prompt)


def learnt_texts(tokenizer: TokenizersBackend, outcome: Encoded) -> list[str]:
    """The text of each run of response tokens."""
    runs: list[list[int]] = [[]]
    for token, mark in zip(outcome.tokens.tolist(), outcome.response, strict=True):
        runs[-1:] = [[*runs[-1], token]] if mark else [runs[-1], []]
    return [tokenizer.decode(run) for run in runs if run]

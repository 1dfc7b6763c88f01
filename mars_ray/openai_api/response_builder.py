"""What chat responses and completion responses have in common.

In:    deltas of the choices, and what the response says about itself.
Out:   objects of the `openai` package, complete or as stream chunks.
Never: waits, or knows where deltas come from.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from openai import BaseModel
from openai.types.completion_usage import CompletionUsage

from mars_ray.openai_api.deltas import OutputDelta

LEAST_LOGPROB = -9999.0
"""Sent in place of minus infinity, which JSON cannot say: what OpenAI gives for a token that could not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMetadata:
    """What every object of one response says about itself, and how its tokens are spelt."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    token_bytes: Sequence[bytes]
    """The bytes of each token id."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; ids the tokenizer does not use have none."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def text_of(self, token: int) -> str:
        """Return the bytes of a token as text, with replacement characters where they are no UTF-8."""
        return self.bytes_of(token).decode(errors="replace")


class ResponseBuilder(Protocol):
    """Builds one response in the shape of chat completions or of completions."""

    def full(self, choices: Sequence[OutputDelta], usage: CompletionUsage) -> BaseModel:
        """Return the complete response, from one concatenated delta for each choice."""

    def chunks(self, delta: OutputDelta) -> Iterator[BaseModel]:
        """Yield the stream chunks that carry a delta."""

    def usage_chunk(self, usage: CompletionUsage) -> BaseModel:
        """Return the last chunk of a stream, which carries the usage and no choice."""


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can say it."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB

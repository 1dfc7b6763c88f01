"""What the two shapes of an answer, chat and completion, have in common.

In:    parts of answers, what the answer is to be called.
Out:   objects of the `openai` package, whole or in pieces.
Never: waits, or knows where parts come from.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from openai import BaseModel
from openai.types.completion_usage import CompletionUsage

from mars_ray.openai_api.parts import Part

LEAST_LOGPROB = -9999.0
"""JSON has no infinity; this is what OpenAI gives for a token that could not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What every object of one answer says about itself."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    token_bytes: Sequence[bytes]

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; ids the tokenizer does not use have none."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def spell(self, token: int) -> str:
        """Return the bytes of a token as text, with replacement characters where they are none."""
        return self.bytes_of(token).decode(errors="replace")


class Reply(Protocol):
    """One answer in one of the two shapes of the API."""

    def whole(self, parts: Sequence[Part], usage: CompletionUsage) -> BaseModel:
        """Return the answer as one object, from one part for each choice."""

    def pieces(self, part: Part) -> Iterator[BaseModel]:
        """Yield the objects that carry a part."""

    def closing(self, usage: CompletionUsage) -> BaseModel:
        """Return the object that carries the usage of a stream."""


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can say it."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB

"""The interface of a compared engine: answer prompts in a batch and time prefill and decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswers:
    """Answers to a batch of prompts, with times."""

    tokens: list[list[int]]
    """Tokens of each answer; the first one comes from the prefill."""
    prompt_seconds: float
    """Seconds until all prompts were read."""
    decode_seconds: float
    """Seconds from then to the end."""
    forwards: int
    """Steps after the prompts were read."""


class Peer(Protocol):
    """An engine that holds a model at some number of bits. Decoding is greedy and stops at the length alone."""

    @property
    def name(self) -> str:
        """Name of the engine and its format."""

    @property
    def bits(self) -> int:
        """Bits of a weight, without scales."""

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> TimedAnswers:
        """Answer all `prompts` together with `tokens` tokens each, without reusing earlier calls."""


class PeerUnavailableError(Exception):
    """An engine cannot run here; the message is the reason shown in the table."""

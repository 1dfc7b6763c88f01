"""Interface of a compared engine: it answers prompts in a batch and times prefill and decoding."""

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
    """Seconds of decoding after the prefill."""
    forwards: int
    """Steps after the prefill."""


class Peer(Protocol):
    """An engine with a model in one format. Decoding is greedy and stops only at the length."""

    @property
    def name(self) -> str:
        """Name of the engine and its format."""

    @property
    def bits(self) -> int:
        """Bits per weight, without scales."""

    @property
    def load_seconds(self) -> float:
        """Seconds that the engine took to load the model."""

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> TimedAnswers:
        """Answer all `prompts` together with `tokens` tokens each, without reusing the cache of earlier calls."""


class PeerUnavailableError(Exception):
    """An engine cannot run here; the message is the reason shown in the table."""

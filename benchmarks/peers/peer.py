"""What an engine must do to be compared: answer prompts together, and say how long reading and decoding took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswers:
    """What an engine said to prompts that it read and answered together."""

    tokens: list[list[int]]
    """The tokens of each answer; its first comes of reading the prompt."""
    prompt_seconds: float
    """Until every prompt had been read."""
    decode_seconds: float
    """From then to the end."""
    forwards: int
    """Steps after the prompts were read."""


class Peer(Protocol):
    """An engine that holds a model at some number of bits. Decoding is greedy and stops at the length alone."""

    @property
    def name(self) -> str:
        """The engine and its format, as its users call them."""

    @property
    def bits(self) -> int:
        """Bits of a weight, scales not counted."""

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> TimedAnswers:
        """Answer all `prompts` together with `tokens` tokens each; nothing of an earlier call is kept."""


class PeerUnavailableError(Exception):
    """An engine that cannot be compared here; the message is the reason, and is shown in its place."""

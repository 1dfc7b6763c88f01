"""What the engine says about a sequence after a step: the tokens it gained, their text, and how it ended.

In:    nothing.
Out:   frozen records that may cross threads and processes.
Never: changes after it left the engine.
"""

from dataclasses import dataclass
from typing import Literal

from mars_ray.errors import MarsRayError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one generated token.

    The distribution is the model's own where the token was chosen, before temperature, penalties and bias, without
    the mask token. For a token accepted at a mask that is the distribution at the mask; in the modes ar and exact it
    is the autoregressive one.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first."""
    start: int | None = None
    """The character of the answer at which the text of the token begins; None for one without, as a stop token. Where
    a stop string ends the text before it, the token is not of the answer."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a sequence ended and what it took."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt whose keys and values another sequence had left behind."""
    tokens: int
    """Generated, the one that stopped it included."""
    forwards: int
    """Runs of the network that gave at least one of them."""
    queued_s: float
    """Seconds until it first ran, or ended without."""
    error: MarsRayError | None = None
    """Set when the reason is "error"."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step gave one sequence."""

    request_id: str
    index: int
    """Which of the n sequences of the request, from 0."""
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text each token settled, and behind the last of a sequence that was cut short what was held back. Text may
    lag behind the tokens: half a character, or what may become a stop string, is kept until more is known."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, when asked for."""
    threshold: float = 1.0
    """The threshold in force in this step."""
    masks: int = 0
    """Masks looked at in this step."""
    finished: Finished | None = None
    """Set in the last chunk of the sequence; every sequence has exactly one such chunk."""
    gains: tuple[int, ...] = ()
    """Of a chunk that is a whole sequence: how many of its tokens each step gave. Empty in the chunk of one step."""

    @property
    def text(self) -> str:
        """New text."""
        return "".join(self.pieces)

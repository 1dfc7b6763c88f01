"""What the engine says about a sequence after a step: the tokens it gained, their text, and how it ended.

The records are frozen and may cross threads and processes.
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
    forward: int = 1
    """The forward of its sequence that gave the token, from 1."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What the model says, one forward later, where a token was accepted at a mask: that of one token at a time."""

    index: int
    """The number of the accepted token in its answer, from 0."""
    token: int
    """The most likely token there, given all before it."""
    confidence: float
    """Its probability."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a sequence ended, and what it took."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt whose keys and values another sequence had left behind."""
    tokens: int
    """Tokens generated, the one that stopped the sequence included."""
    forwards: int
    """Runs of the network that gave at least one token."""
    queued_s: float
    """Seconds until the sequence first ran, or ended without having run."""
    error: MarsRayError | None = None
    """What went wrong, where the reason is "error"."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step gave one sequence."""

    request_id: str
    index: int
    """Which of the n sequences of the request this is, from 0."""
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text each token settled, and behind the last of a sequence that was cut short what was held back. Text may
    lag behind the tokens: half a character, or what may become a stop string, is kept until more is known."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of each token, when asked for."""
    audits: tuple[Audit, ...] = ()
    """What one token at a time would have said where the step before accepted tokens at masks: with log-probabilities
    and at temperature 0. The tokens of the last step are not looked at again."""
    threshold: float = 1.0
    """The threshold in force in this step."""
    masks: int = 0
    """Masks looked at in this step."""
    finished: Finished | None = None
    """Set in the last chunk of the sequence; every sequence has exactly one such chunk."""
    accepted_lengths: tuple[int, ...] = ()
    """Tokens each step gave, in the one chunk of a sequence that was not streamed; empty in the chunk of one step."""

    @property
    def text(self) -> str:
        """The text that is new in this chunk."""
        return "".join(self.pieces)

"""The output of a step for one sequence: its new tokens, their text, and its end. The records are frozen."""

from dataclasses import dataclass
from typing import Literal

from mars_ray.errors import MarsRayError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one generated token.

    The distribution is the model's own at the position that chose the token: before temperature, penalties and bias,
    and without the mask token. In the modes ar and exact that position is the autoregressive one; for a token accepted
    at a mask it is the mask.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first."""
    start: int | None = None
    """Character of the answer at which the text of the token begins; None for a token without text, such as a stop
    token. A token that begins after the end of the text belongs to a stop string."""
    forward: int = 1
    """Number of the forward of the sequence that gave the token, from 1."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The token that autoregressive decoding would have chosen in place of one accepted at a mask."""

    index: int
    """Position of the accepted token in its answer, from 0."""
    token: int
    """Most likely token at this position, given all tokens before it."""
    confidence: float
    """Probability of `token`."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sequence, and its cost."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were in the cache already."""
    tokens: int
    """Generated tokens, with the one that stopped the sequence."""
    forwards: int
    """Forwards that gave at least one token."""
    queued_s: float
    """Seconds until the sequence first ran, or ended without running."""
    error: MarsRayError | None = None
    """The error, if the reason is "error"."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The output of one step for one sequence."""

    request_id: str
    index: int
    """Number of the sequence among the n of its request, from 0."""
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """Text that each token adds; a sequence that is cut short has one more piece, with the text held back so far. Half
    a character, or a possible beginning of a stop string, is held back until the next tokens decide."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of each token, if requested."""
    audits: tuple[Audit, ...] = ()
    """Audits of the tokens that the previous step accepted at masks, for requests with log-probabilities at
    temperature 0. The tokens of the last step are not audited."""
    threshold: float = 1.0
    """Threshold of this step."""
    masks: int = 0
    """Masks fed in this step."""
    finished: Finished | None = None
    """The end of the sequence, in its last chunk only."""
    accepted_lengths: tuple[int, ...] = ()
    """Tokens that each step gave, in the single chunk of a sequence that is not streamed; else empty."""

    @property
    def text(self) -> str:
        """New text of this chunk."""
        return "".join(self.pieces)

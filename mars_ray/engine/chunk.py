"""The output of one engine step for one sequence: new tokens, their text, and the end of the sequence."""

from dataclasses import dataclass
from typing import Literal

from mars_ray.errors import MarsRayError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities for one token of an answer or of a prompt.

    The probabilities are the model's own, before temperature, penalties and bias, and without the mask token. They are
    read at the position that chose the token: the mask for a token accepted at a mask, otherwise the token before it.
    In the modes ar and exact, that position is always the token before.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    """Most likely tokens with their log-probabilities, best first."""
    start: int | None = None
    """Index in the answer of the character at which the token's text begins. None for a token without text, such as a
    stop token. A token that begins beyond the end of the answer belongs to a stop string."""
    forward: int = 1
    """Number of the forward that produced the token, counted from 1 in each sequence. 0 for a token of a prompt."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The token that autoregressive decoding would have chosen instead of a token accepted at a mask."""

    index: int
    """Position of the accepted token in its answer, counted from 0."""
    token: int
    """Most likely token at this position, given all tokens before it."""
    confidence: float
    """Probability of `token`."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Why a sequence ended, and what the sequence cost."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens whose keys and values were already in the cache."""
    tokens: int
    """Number of generated tokens, including the one that stopped the sequence."""
    forwards: int
    """Number of forwards that produced at least one token."""
    queued_s: float
    """Seconds that the sequence waited in the queue until it first ran, or until it ended without running."""
    prefill_s: float = 0.0
    """Seconds from the first run of the sequence to its first token, or to its end without a token."""
    decode_s: float = 0.0
    """Seconds from the first token of the sequence to its end."""
    error: MarsRayError | None = None
    """The error, if `reason` is "error"."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The output of one step for one sequence."""

    request_id: str
    index: int
    """Number of the sequence among the n sequences of its request, counted from 0."""
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """Text that each token adds. An incomplete character, or a possible beginning of a stop string, is held back until
    later tokens complete it. If the sequence is cut short, an extra piece at the end holds the text that was held
    back."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of each token, if the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens from the second on, in the first chunk of a request's first sequence, if
    the request asked for them."""
    audits: tuple[Audit, ...] = ()
    """Audits of the tokens that the previous step accepted at masks. Present only for requests that ask for
    log-probabilities at temperature 0. The tokens of the last step are not audited."""
    threshold: float = 1.0
    """Threshold in this step."""
    accepted: tuple[tuple[float, int], ...] = ()
    """Number of tokens accepted at masks without verification, by the threshold in force. Only thresholds with such
    tokens are listed."""
    masks: int = 0
    """Number of masks in this step."""
    finished: Finished | None = None
    """The end of the sequence, in its last chunk only."""
    accepted_lengths: tuple[int, ...] = ()
    """Number of tokens that each step added to the single chunk of a sequence that is not streamed. Empty when
    streaming."""

    @property
    def text(self) -> str:
        """Text of this chunk."""
        return "".join(self.pieces)

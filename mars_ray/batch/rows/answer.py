"""One sequence as the engine ended it."""

from dataclasses import dataclass

from mars_ray.engine.chunk import Chunk, Finished, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The text and tokens of one sequence, and how they came about."""

    text: str
    tokens: tuple[int, ...]
    """The tokens, the one that stopped it included."""
    gains: tuple[int, ...] = ()
    """Number of tokens that each forward gave."""
    logprobs: tuple[TokenLogprobs, ...]
    """Logprobs of each token, when asked for."""
    threshold: float
    """The least threshold in force while it was decoded."""
    finished: Finished


def answer_of(whole: Chunk) -> Answer:
    """Return what a chunk says that holds a whole sequence."""
    assert whole.finished is not None
    return Answer(
        text=whole.text,
        tokens=whole.tokens,
        gains=whole.gains,
        logprobs=whole.logprobs,
        threshold=whole.threshold,
        finished=whole.finished,
    )

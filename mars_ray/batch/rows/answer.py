"""One sequence as the engine ended it."""

from dataclasses import dataclass

from mars_ray.engine.chunk import Chunk, Finished, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Text, tokens, and how they came about."""

    text: str
    tokens: tuple[int, ...]
    """The one that stopped it included."""
    gains: tuple[int, ...] = ()
    """How many of the tokens each forward gave."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, when asked for."""
    threshold: float
    """The least in force while it was decoded."""
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

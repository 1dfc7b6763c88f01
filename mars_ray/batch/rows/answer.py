"""One sequence as the engine ended it."""

from dataclasses import dataclass

from mars_ray.engine.chunk import Chunk, Finished, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The text and tokens of one sequence, and how they came about."""

    text: str
    tokens: tuple[int, ...]
    """The tokens, the one that stopped it included."""
    accepted_lengths: tuple[int, ...] = ()
    """Number of tokens that each forward gave."""
    logprobs: tuple[TokenLogprobs, ...]
    """Logprobs of each token, when asked for."""
    threshold: float
    """The least threshold in force while it was decoded."""
    finished: Finished


def answer_of(chunk: Chunk) -> Answer:
    """Return what the one chunk of a sequence says that was not streamed."""
    assert chunk.finished is not None
    return Answer(
        text=chunk.text,
        tokens=chunk.tokens,
        accepted_lengths=chunk.accepted_lengths,
        logprobs=chunk.logprobs,
        threshold=chunk.threshold,
        finished=chunk.finished,
    )

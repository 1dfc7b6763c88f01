"""One sequence as the engine ended it.

In:    the chunks of a sequence.
Out:   a frozen record.
Never: knows what row it is for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mars_ray.engine.chunk import Chunk, Finished, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Text, tokens, and how they came about."""

    text: str
    tokens: tuple[int, ...]
    """The one that stopped it included."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, when asked for."""
    threshold: float
    """The least in force while it was decoded."""
    finished: Finished


def answer_of(chunks: Sequence[Chunk]) -> Answer:
    """Join the chunks of one sequence, the last of which says how it ended."""
    finished = chunks[-1].finished
    assert finished is not None
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        logprobs=tuple(each for chunk in chunks for each in chunk.logprobs),
        threshold=min(chunk.threshold for chunk in chunks),
        finished=finished,
    )

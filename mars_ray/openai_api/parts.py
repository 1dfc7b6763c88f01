"""Chunks of the engine -> parts of numbered answers, whole, by step or by token.

In:    chunks of one sequence, and which answer it is.
Out:   parts in which tokens, text and log-probabilities belong together.
Never: knows the shape of an API.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mars_ray.engine.chunk import Chunk, TokenLogprobs

Reason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Part:
    """Some of one answer: consecutive tokens, the text they settled, and how it ended if it did."""

    choice: int
    pieces: tuple[str, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    reason: Reason | None

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return "".join(self.pieces)


class Entry(NamedTuple):
    """The log-probabilities of one token."""

    token: int
    start: int
    """The character of the answer at which its text begins."""
    logprobs: TokenLogprobs


class Entries:
    """The log-probabilities of what is said, as it is said: those of tokens whose text is held back, for it may become
    a stop string, wait with it; tokens that no text comes of have none."""

    def __init__(self) -> None:
        self._said: defaultdict[int, int] = defaultdict(int)
        """Characters of each answer."""
        self._waiting: defaultdict[int, list[Entry]] = defaultdict(list)

    def of(self, part: Part) -> list[Entry]:
        """Return those that come with the text of `part`."""
        waiting = self._waiting[part.choice]
        for token, logprobs in zip(part.tokens, part.logprobs, strict=bool(part.logprobs)):
            if logprobs.start is not None:
                waiting.append(Entry(token, logprobs.start, logprobs))
        self._said[part.choice] += len(part.text)
        coming = [entry for entry in waiting if entry.start < self._said[part.choice]]
        del waiting[: len(coming)]
        return coming


def part_of(chunk: Chunk, choice: int) -> Part:
    """Return what a chunk says of answer number `choice`."""
    reason: Reason | None = None
    if chunk.finished:
        reason = "stop" if chunk.finished.reason == "stop" else "length"
    return Part(choice, chunk.pieces, chunk.tokens, chunk.logprobs, reason)


def single_tokens(part: Part) -> Iterator[Part]:
    """Cut a part into one for each token; the last keeps the reason."""
    # A part without tokens and text is one all the same, for it may carry the reason.
    count = max(len(part.tokens), len(part.pieces), 1)
    for number in range(count):
        yield Part(
            part.choice,
            part.pieces[number : number + 1],
            part.tokens[number : number + 1],
            part.logprobs[number : number + 1],
            part.reason if number + 1 == count else None,
        )


def joined(parts: Sequence[Part]) -> Part:
    """Join the parts of one answer."""
    return Part(
        parts[0].choice,
        tuple(piece for part in parts for piece in part.pieces),
        tuple(token for part in parts for token in part.tokens),
        tuple(entry for part in parts for entry in part.logprobs),
        parts[-1].reason,
    )

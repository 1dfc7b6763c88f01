"""Answers that nobody reads before they are whole.

In:    the chunks of a step.
Out:   what of them goes on: of a sequence that is wanted whole one chunk, when it ended.
Never: changes what a chunk says, but that a whole one has the least threshold and the most masks of all its steps.
"""

from collections import defaultdict
from collections.abc import Sequence

from mars_ray.engine.chunk import Chunk


class Gatherer:
    """Keeps the chunks of the requests it was told of."""

    def __init__(self) -> None:
        self._wanted: set[str] = set()
        self._kept: defaultdict[tuple[str, int], list[Chunk]] = defaultdict(list)

    def want(self, request_id: str) -> None:
        """Hold the chunks of a request back until its sequences have ended."""
        self._wanted.add(request_id)

    def forget(self, request_id: str) -> None:
        """Note that no sequence of a request will say anything more."""
        self._wanted.discard(request_id)
        for place in [place for place in self._kept if place[0] == request_id]:
            del self._kept[place]

    def gather(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks that go on."""
        if not self._wanted:
            return list(chunks)
        leaving = []
        for chunk in chunks:
            if chunk.request_id not in self._wanted:
                leaving.append(chunk)
                continue
            place = (chunk.request_id, chunk.index)
            self._kept[place].append(chunk)
            if chunk.finished:
                leaving.append(_joined(self._kept.pop(place)))
        return leaving


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    last = chunks[-1]
    return Chunk(
        request_id=last.request_id,
        index=last.index,
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        pieces=tuple(piece for chunk in chunks for piece in chunk.pieces),
        logprobs=tuple(each for chunk in chunks for each in chunk.logprobs),
        threshold=min(chunk.threshold for chunk in chunks),
        masks=max(chunk.masks for chunk in chunks),
        finished=last.finished,
        gains=tuple(len(chunk.tokens) for chunk in chunks if chunk.tokens),
    )

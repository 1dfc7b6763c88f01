"""One chunk for each sequence of the requests that are not streamed.

The fewer chunks leave the engine's process, the less both ends have to do. The joined chunk says what the chunks of the
steps said, with the least threshold and the most masks of all of them.
"""

from collections import defaultdict
from collections.abc import Sequence

from mars_ray.engine.chunk import Chunk


class ChunkCollector:
    """Keeps the chunks of requests that are not streamed until their sequences have ended."""

    def __init__(self) -> None:
        self._collected: set[str] = set()
        self._chunks: defaultdict[tuple[str, int], list[Chunk]] = defaultdict(list)

    def collect(self, request_id: str) -> None:
        """Hold the chunks of a request back from now on, until its sequences have ended."""
        self._collected.add(request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request: none of its sequences will give another chunk."""
        self._collected.discard(request_id)
        for place in [place for place in self._chunks if place[0] == request_id]:
            del self._chunks[place]

    def add(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Take the chunks of a step and return those to send now."""
        if not self._collected:
            return list(chunks)
        ready = []
        for chunk in chunks:
            if chunk.request_id not in self._collected:
                ready.append(chunk)
                continue
            place = (chunk.request_id, chunk.index)
            self._chunks[place].append(chunk)
            if chunk.finished:
                ready.append(_joined(self._chunks.pop(place)))
        return ready


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    last = chunks[-1]
    return Chunk(
        request_id=last.request_id,
        index=last.index,
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        pieces=tuple(piece for chunk in chunks for piece in chunk.pieces),
        logprobs=tuple(each for chunk in chunks for each in chunk.logprobs),
        audits=tuple(each for chunk in chunks for each in chunk.audits),
        threshold=min(chunk.threshold for chunk in chunks),
        masks=max(chunk.masks for chunk in chunks),
        finished=last.finished,
        accepted_lengths=tuple(len(chunk.tokens) for chunk in chunks if chunk.tokens),
    )

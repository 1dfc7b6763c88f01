"""Join the chunks of requests that are not streamed into one chunk per sequence.

This saves work at both ends of the socket. A joined chunk has the lowest threshold and the largest number of masks
among its parts.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from mars_ray.engine.chunk import Chunk


class ChunkCollector:
    """Holds the chunks of non-streamed requests until their sequences have ended."""

    def __init__(self) -> None:
        self._collected: set[str] = set()
        self._chunks: defaultdict[tuple[str, int], list[Chunk]] = defaultdict(list)

    def collect(self, request_id: str) -> None:
        """Hold the chunks of a request from now on."""
        self._collected.add(request_id)

    def forget(self, request_id: str) -> None:
        """Drop the held chunks of a request that has ended."""
        self._collected.discard(request_id)
        for sequence in [sequence for sequence in self._chunks if sequence[0] == request_id]:
            del self._chunks[sequence]

    def add(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Add the chunks of a step, and return the chunks to send now."""
        if not self._collected:
            return list(chunks)
        ready = []
        for chunk in chunks:
            if chunk.request_id not in self._collected:
                ready.append(chunk)
                continue
            sequence = (chunk.request_id, chunk.index)
            self._chunks[sequence].append(chunk)
            if chunk.finished:
                ready.append(joined_chunk(self._chunks.pop(sequence)))
        return ready


def joined_chunk(chunks: Sequence[Chunk]) -> Chunk:
    """Return all chunks of one sequence as one chunk."""
    last = chunks[-1]
    return Chunk(
        request_id=last.request_id,
        index=last.index,
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        pieces=tuple(piece for chunk in chunks for piece in chunk.pieces),
        logprobs=tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
        prompt_logprobs=tuple(logprobs for chunk in chunks for logprobs in chunk.prompt_logprobs),
        audits=tuple(audit for chunk in chunks for audit in chunk.audits),
        threshold=min(chunk.threshold for chunk in chunks),
        accepted=_added(chunks),
        masks=max(chunk.masks for chunk in chunks),
        finished=last.finished,
        accepted_lengths=tuple(len(chunk.tokens) for chunk in chunks if chunk.tokens),
    )


def _added(chunks: Sequence[Chunk]) -> tuple[tuple[float, int], ...]:
    counts: Counter[float] = Counter()
    for chunk in chunks:
        counts.update(dict(chunk.accepted))
    return tuple(counts.items())

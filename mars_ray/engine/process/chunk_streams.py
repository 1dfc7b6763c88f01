"""The chunks of requests on their way from the engine to the coroutines that read them."""

import asyncio
import logging
import sys
from collections.abc import Sequence

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.progress import Progress
from mars_ray.engine.request import Request
from mars_ray.errors import EngineHungError, MarsRayError, ReplicaLostError, RequestError, SlowReaderError

log = logging.getLogger(__name__)

UNLIMITED = sys.maxsize
"""Buffer limit for requests that are not streamed, because each of their sequences arrives whole, in one chunk."""

LOST = "the engine stopped before the request ended."
HUNG = "the engine hung, and only this request can be the cause. Change the request."


class ChunkStream:
    """A buffer of chunks that ends with the last chunk of the last sequence, or with an error."""

    def __init__(self, request: Request, buffered_tokens: int) -> None:
        self._left = len(request.indices)
        self._limit = buffered_tokens
        self._buffered = 0
        self._chunks: asyncio.Queue[Chunk | MarsRayError] = asyncio.Queue()
        self.open = True
        """True while more chunks will arrive."""
        self.begun = False
        """True once a chunk has arrived."""
        self.added: int | None = None
        """Number of progress checks so far when the request was sent; None until it is sent."""

    @property
    def overfull(self) -> bool:
        """Whether the reader is further behind than the buffer allows."""
        return self._buffered > self._limit

    def put(self, chunk: Chunk) -> None:
        """Add a chunk for the reader."""
        self._chunks.put_nowait(chunk)
        self.begun = True
        self._buffered += len(chunk.tokens)
        self._left -= chunk.finished is not None
        self.open = self._left > 0

    def fail(self, error: MarsRayError) -> None:
        """End the stream with an error, after the chunks before it."""
        self.open = False
        self._chunks.put_nowait(error)

    async def next(self) -> Chunk | None:
        """Return the next chunk, or None after the last one. Raises the error that ended the stream."""
        if not self.open and self._chunks.empty():
            return None
        chunk = await self._chunks.get()
        if isinstance(chunk, MarsRayError):
            raise chunk
        self._buffered -= len(chunk.tokens)
        return chunk


class ChunkStreams:
    """The streams of all requests that have not ended, by the ids of the requests."""

    def __init__(self, buffered_tokens: int) -> None:
        self._buffered_tokens = buffered_tokens
        self._streams: dict[str, ChunkStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, request: Request, *, whole: bool) -> ChunkStream:
        """Return the stream of a new request; `whole` if each sequence arrives as one chunk. Raises `RequestError`."""
        if request.id in self._streams:
            raise RequestError(f"a request with the id {request.id!r} is already here; ids must differ.")
        stream = self._streams[request.id] = ChunkStream(request, UNLIMITED if whole else self._buffered_tokens)
        return stream

    def close(self, request_id: str, stream: ChunkStream) -> None:
        """Forget the stream of a request. A newer one with the id stays."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]

    def deliver(self, chunks: Sequence[Chunk]) -> list[str]:
        """Pass chunks to their readers, and return the ids of requests whose readers are too slow; these have failed.

        What comes with these chunks does not count as behind, because the readers could not read it yet.
        """
        streams = {chunk.request_id: self._streams.get(chunk.request_id) for chunk in chunks}
        behind = {request_id for request_id, stream in streams.items() if stream and stream.overfull}
        slow = []
        for chunk in chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is None:
                continue
            stream.put(chunk)
            if not stream.open:
                del self._streams[chunk.request_id]
            elif chunk.request_id in behind:
                log.warning("request %s is cancelled, because its reader is too slow", chunk.request_id)
                slow.append(chunk.request_id)
                error = (
                    f"the reader is more than {self._buffered_tokens} tokens behind; the request was cancelled. Read "
                    "faster, or ask for fewer tokens."
                )
                self.fail(chunk.request_id, SlowReaderError(error))
        return slow

    def fail(self, request_id: str, error: MarsRayError) -> None:
        """End the stream of a request with an error, unless it has ended."""
        if stream := self._streams.pop(request_id, None):
            stream.fail(error)

    def lose(self) -> None:
        """Fail the requests that a process had when it ended. Others may be sent to the next process."""
        for request_id in [id for id, stream in self._streams.items() if stream.added is not None]:
            self.fail(request_id, ReplicaLostError(LOST))

    def fail_suspect(self, progress: Progress) -> bool:
        """Fail the request that makes the engine stall; return False if it could be any of several.

        The engine handles orders in sequence, so requests sent after the last check have not reached it. Requests that
        were sent before the last check but one that showed progress, or that have received a chunk, have already
        survived a step.
        """
        checks = progress.checks
        arrived = {
            id: stream for id, stream in self._streams.items() if stream.added is not None and stream.added < checks
        }
        since = checks - progress.unchanged - 2
        new = [id for id, stream in arrived.items() if not stream.begun and (stream.added or 0) >= since]
        suspects = new or list(arrived)
        if len(suspects) != 1:
            return False
        self.fail(suspects[0], EngineHungError(HUNG))
        return True

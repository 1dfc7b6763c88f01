"""The chunks of one request on their way from the engine to the coroutine that reads them."""

import asyncio

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError


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

"""The engine behind asyncio: one worker thread decodes, any number of coroutines read.

In:    requests from the event loop.
Out:   for each an asynchronous stream of chunks; leaving a stream early cancels its request.
Never: lets a slow reader hold the others up, or buffers without bound for one.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.engine import Engine
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError, SlowReaderError, StepError

log = logging.getLogger(__name__)

BUFFERED_TOKENS = 2048
"""A stream whose reader is further behind than this is cancelled: its row serves someone who reads."""

T = TypeVar("T")


class AsyncEngine:
    """Owns `engine` until `close`. Create and use it within one running event loop."""

    def __init__(self, engine: Engine, *, buffered_tokens: int = BUFFERED_TOKENS) -> None:
        self._engine, self._buffered_tokens = engine, buffered_tokens
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}
        self._closed = False
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Yield the chunks of all n sequences as they come; the last of each says how it ended.

        Raises `RequestError` or `QueueFullError` before any work, and `SlowReaderError` when the stream was cancelled
        because its chunks were not taken. Leave it early only with `aclose` or by cancelling the task.
        """
        stream = _Stream(request, self._buffered_tokens)
        try:
            await self.call(lambda engine: self._start(engine, stream))
            async for chunk in stream:
                yield chunk
        finally:
            if stream.open:
                self._cancel(stream)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function` on the engine between two steps and return what it returns."""
        done: asyncio.Future[T] = self._loop.create_future()

        def settle(settled: Callable[[], None]) -> None:
            if not done.cancelled():
                settled()

        def command() -> None:
            try:
                settled = partial(done.set_result, function(self._engine))
            except Exception as error:
                settled = partial(done.set_exception, error)
            self._loop.call_soon_threadsafe(settle, settled)

        if self._closed:
            raise StepError("The engine is closed and takes no more requests.")
        self._commands.put(command)
        return await done

    async def close(self) -> None:
        """Stop the worker; streams still open end with a `StepError`."""
        self._closed = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._fail_all(StepError("The engine was closed before the request ended."))

    def _start(self, engine: Engine, stream: "_Stream") -> None:
        engine.add(stream.request)
        stream.started = True
        self._loop.call_soon_threadsafe(self._streams.__setitem__, stream.request.id, stream)

    def _cancel(self, stream: "_Stream") -> None:
        """Tell the worker; a stream that never started may bear the id of another that did."""
        self._commands.put(lambda: self._engine.cancel(stream.request.id) if stream.started else None)

    def _work(self) -> None:
        """Run on the worker thread: commands between steps, steps while there is work."""
        while True:
            while not self._commands.empty() or not self._engine.busy:
                command = self._commands.get()
                if command is None:
                    self._engine.close()
                    return
                command()
            try:
                chunks = self._engine.step()
            except Exception as error:  # a bug of ours; those who wait must hear of it all the same
                log.exception("a step failed as a whole")
                for request_id in list(self._streams):
                    self._engine.cancel(request_id)
                self._loop.call_soon_threadsafe(self._fail_all, StepError(f"decoding failed: {error!r}."))
            else:
                self._loop.call_soon_threadsafe(self._deliver, chunks)

    def _fail_all(self, error: StepError) -> None:
        """Run on the event loop."""
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()

    def _deliver(self, chunks: list[Chunk]) -> None:
        """Run on the event loop."""
        for chunk in chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is None:
                continue
            stream.put(chunk)
            if not stream.open:
                del self._streams[chunk.request_id]
            elif stream.overfull:
                log.warning("request %s is cancelled: its reader is too slow", chunk.request_id)
                self._cancel(stream)
                stream.fail(
                    SlowReaderError(
                        f"the reader is more than {self._buffered_tokens} tokens behind; the request was cancelled. "
                        "Read faster, or ask for fewer tokens."
                    )
                )
                del self._streams[chunk.request_id]


class _Stream:
    """Chunks on their way to one reader. Used on the event loop only."""

    def __init__(self, request: Request, buffered_tokens: int) -> None:
        self.request, self.started = request, False
        self._left, self._limit, self._buffered = request.sampling.n, buffered_tokens, 0
        self._chunks: asyncio.Queue[Chunk | MarsRayError] = asyncio.Queue()
        self.open = True
        """Whether the engine still works for it."""

    @property
    def overfull(self) -> bool:
        return self._buffered > self._limit

    def put(self, chunk: Chunk) -> None:
        self._chunks.put_nowait(chunk)
        self._buffered += len(chunk.tokens)
        self._left -= chunk.finished is not None
        self.open = self._left > 0

    def fail(self, error: MarsRayError) -> None:
        self.open = False
        self._chunks.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while self.open or not self._chunks.empty():
            chunk = await self._chunks.get()
            if isinstance(chunk, MarsRayError):
                raise chunk
            self._buffered -= len(chunk.tokens)
            yield chunk

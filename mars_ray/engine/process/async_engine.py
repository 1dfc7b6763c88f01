"""An engine behind asyncio: it decodes in a process of its own, and any number of coroutines read.

Each request gives an asynchronous stream of chunks; leaving the stream early cancels the request. A slow reader does
not hold the others up, and what is buffered for one is bounded.

A process and not a thread: a step holds the interpreter for most of its time, and so does a server.
"""

import asyncio
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.grammar_checker import GrammarChecker
from mars_ray.engine.process.grammar_store import GrammarStore
from mars_ray.engine.process.messages import (
    Add,
    AskState,
    Cancel,
    EngineFacts,
    EngineSpec,
    Failed,
    Order,
    Prepared,
    Refused,
    SetThresholds,
    Started,
    frame,
    read_event,
)
from mars_ray.engine.request import Request
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import (
    EngineHungError,
    GrammarError,
    MarsRayError,
    ReplicaLostError,
    RequestError,
    SlowReaderError,
)

log = logging.getLogger(__name__)

BUFFERED_TOKENS = 2048
"""A stream whose reader is further behind than this is cancelled: its slot serves someone who reads."""

UNLIMITED = sys.maxsize
"""Tokens that may be buffered for a request that is not streamed: its sequences come in one piece, however long."""

STEP_SECONDS = 300
"""No step takes so long: an engine that is at one for longer hangs."""

SPIN = {"GOMP_SPINCOUNT": "1000"}
"""How long a thread that waits for another keeps its core, some 50 microseconds. By the default of many milliseconds it
takes the core from the very thread it waits for, where anything else runs beside them."""

LOST = "the engine stopped before the request ended."
HUNG = "the engine hangs with this request alone, which is not sent to another. Change the request."
TELL_SECONDS = 1.0
"""Time for the request that an engine hangs with to hear of it, before its replica ends with the engine."""


class AsyncEngine:
    """The asking end of `connected`; `serve_engine` has the other. Use it within one running event loop."""

    def __init__(self, connected: socket.socket, *, buffered_tokens: int = BUFFERED_TOKENS) -> None:
        self._socket, self._buffered_tokens = connected, buffered_tokens
        self._streams: dict[str, _Stream] = {}
        self._states: deque[asyncio.Future[EngineState]] = deque()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._grammars: GrammarStore | None = None
        """Where the engine has a process of its own, what it may compile."""
        self._asks = 0
        """How often it was asked whether it hangs."""
        self.gone = asyncio.Event()
        """Set when the engine died by itself, or was ended because it hung."""

    @classmethod
    async def start(cls, spec: EngineSpec, *, step_seconds: int = STEP_SECONDS) -> tuple["AsyncEngine", EngineFacts]:
        """Start a process with the engine of `spec`, which is ended when a step takes longer than `step_seconds`.

        Raises what the engine raised: `ModelError`, `ConfigError`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "mars_ray.engine.process.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                env=SPIN | os.environ | {"OMP_NUM_THREADS": str(spec.threads)},
            )
        engine = cls(ours)
        engine._process = process
        reader = await engine._connect()
        assert engine._writer is not None
        engine._writer.write(frame(spec))
        said = await read_event(reader)
        if isinstance(said, Started):
            if said.tokenizer is not None:
                engine._grammars = GrammarStore(GrammarChecker(said.tokenizer), engine._order)
            engine._reading = asyncio.create_task(engine._read(reader))
            engine._watching = asyncio.create_task(engine._end_if_hung(step_seconds))
            return engine, said.facts
        await engine.close()
        raise said.error if isinstance(said, Failed) else ReplicaLostError("the engine died while it started.")

    async def open(self) -> None:
        """Begin to read, where the engine at the other end runs already."""
        self._reading = asyncio.create_task(self._read(await self._connect()))

    async def generate(self, request: Request, *, stream: bool = True) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of all n sequences as they come; the last of each says how it ended.

        Without `stream`, each sequence is one chunk, which comes when it has ended.

        Raises `RequestError` or `QueueFullError` before any work, `ReplicaLostError` when the engine died,
        `EngineHungError` when it hung with this request alone as the suspect, and `SlowReaderError` when the stream was
        cancelled because its chunks were not taken. Leave it early only with `aclose` or by cancelling the task.
        """
        if request.id in self._streams:
            raise RequestError(f"a request with the id {request.id!r} is already here; ids must differ.")
        chunks = self._streams[request.id] = _Stream(request, self._buffered_tokens if stream else UNLIMITED)
        try:
            async with self._grammar_of(request):
                self._order(Add(request, stream))
                chunks.added = self._asks
                async for chunk in chunks:
                    yield chunk
        finally:
            if self._streams.get(request.id) is chunks:
                del self._streams[request.id]
                self._cancel(request.id)

    def has(self, request_id: str) -> bool:
        """Return whether a request is here and has not ended."""
        return request_id in self._streams

    async def state(self) -> EngineState:
        """Return how the engine is after the step it is at. Raises `ReplicaLostError`; waits while a step does."""
        answer: asyncio.Future[EngineState] = asyncio.get_running_loop().create_future()
        self._order(AskState())
        self._states.append(answer)
        return await answer

    def set_thresholds(self, by_class: Mapping[str, float]) -> None:
        """Set the thresholds of requests that name none, from the next step on.

        Values are those of `Engine.set_thresholds`, checked before. Raises `ReplicaLostError`.
        """
        self._order(SetThresholds(by_class))

    async def close(self) -> None:
        """Stop the engine; streams still open end with a `ReplicaLostError`."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        for task in (self._reading, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await self._process.wait()
        self._lose()
        if self._grammars is not None:
            await self._grammars.close()

    async def _connect(self) -> asyncio.StreamReader:
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        return reader

    def _grammar_of(self, request: Request) -> AbstractAsyncContextManager[None]:
        """Keep the grammar of a request, if it has one, compiled in the engine within the block."""
        grammar = request.sampling.grammar
        if grammar is None or self._process is None:
            return nullcontext()
        if self._grammars is None:
            raise GrammarError("the tokenizer of this model can follow no grammar: it is no fast tokenizer.")
        return self._grammars.use(grammar, request.tenant)

    def _order(self, order: Order) -> None:
        if self._writer is None or self._writer.is_closing():
            raise ReplicaLostError("the engine is gone and takes no more requests.")
        self._writer.write(frame(order))

    def _cancel(self, request_id: str) -> None:
        with suppress(ReplicaLostError):  # nothing runs any more
            self._order(Cancel(request_id))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Deliver events until the engine is gone."""
        while True:
            match await read_event(reader):
                case None:
                    break
                case EngineState() as state:
                    answer = self._states.popleft()
                    if not answer.done():
                        answer.set_result(state)
                case Prepared(grammar, error):
                    assert self._grammars is not None
                    self._grammars.compiled(grammar, error)
                case Refused(request_id, error):
                    if stream := self._streams.pop(request_id, None):
                        stream.fail(error)
                case list() as chunks:
                    self._deliver(chunks)
        log.error("the engine is gone")
        self.gone.set()
        assert self._writer is not None
        self._writer.close()
        self._lose()

    async def _end_if_hung(self, step_seconds: int) -> None:
        assert self._process is not None
        try:
            while await self._steps(step_seconds):
                await asyncio.sleep(1)
        except ReplicaLostError:
            return
        log.error("the engine hangs: a step did not end in %d s", step_seconds)
        if (suspect := self._suspect()) is not None:
            self._streams.pop(suspect).fail(EngineHungError(HUNG))
            await asyncio.sleep(TELL_SECONDS)
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _steps(self, seconds: int) -> bool:
        """Return whether the step that the engine is at ends. Raises `ReplicaLostError`."""
        state = asyncio.ensure_future(self.state())
        self._asks += 1
        for _ in range(seconds):  # one long wait would end at once where the machine was suspended meanwhile
            done, _ = await asyncio.wait((state,), timeout=1)
            if done:
                state.result()
                return True
        state.cancel()
        return False

    def _suspect(self) -> str | None:
        """Return the one request that can be why the engine hangs, where there is but one.

        Orders are obeyed in turn, so what was added behind the last question did not arrive. What was there before the
        last question but one, or got a chunk, has seen a step end.
        """
        arrived = {id: each for id, each in self._streams.items() if each.added is not None and each.added < self._asks}
        new = [id for id, each in arrived.items() if not each.begun and (each.added or 0) >= self._asks - 2]
        suspects = new or list(arrived)
        return suspects[0] if len(suspects) == 1 else None

    def _lose(self) -> None:
        """End what waits for an engine that is no more."""
        for stream in self._streams.values():
            stream.fail(ReplicaLostError(LOST))
        self._streams.clear()
        if self._grammars is not None:
            self._grammars.lose(ReplicaLostError(LOST))
        for answer in self._states:
            if not answer.done():
                answer.set_exception(ReplicaLostError(LOST))
        self._states.clear()

    def _deliver(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is None:
                continue
            stream.put(chunk)
            if not stream.open:
                del self._streams[chunk.request_id]
            elif stream.overfull:
                log.warning("request %s is cancelled: its reader is too slow", chunk.request_id)
                del self._streams[chunk.request_id]
                self._cancel(chunk.request_id)
                stream.fail(
                    SlowReaderError(
                        f"the reader is more than {self._buffered_tokens} tokens behind; the request was cancelled. "
                        "Read faster, or ask for fewer tokens."
                    )
                )


class _Stream:
    """Chunks on their way to one reader."""

    def __init__(self, request: Request, buffered_tokens: int) -> None:
        self._left, self._limit, self._buffered = request.sampling.n, buffered_tokens, 0
        self._chunks: asyncio.Queue[Chunk | MarsRayError] = asyncio.Queue()
        self.open = True
        """Whether more is to come."""
        self.begun = False
        """Whether a chunk came."""
        self.added: int | None = None
        """How often the engine had been asked whether it hangs when the request was sent to it."""

    @property
    def overfull(self) -> bool:
        return self._buffered > self._limit

    def put(self, chunk: Chunk) -> None:
        self._chunks.put_nowait(chunk)
        self.begun = True
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

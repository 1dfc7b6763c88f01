"""An asyncio interface to an engine in a child process, for any number of coroutines.

Each request returns an asynchronous stream of chunks; closing the stream early cancels the request. A slow reader does
not delay other readers, and its buffer is bounded.

The engine runs in a process rather than a thread, because both steps and servers hold the interpreter lock most of the
time. Processes that only pass requests on load no torch, which saves 300 MB and 4 s each.
A process that makes no progress is killed (`progress`). Its requests fail with `ReplicaLostError` and may be tried
again. The request that can be the cause, which is the newest one or the only one, fails with `EngineHungError`.

A process that ends can be replaced (`restarts`). Later requests wait for the new process.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.chunk_streams import ChunkStreams
from mars_ray.engine.process.connection import ENDED, EngineConnection
from mars_ray.engine.process.engine_process import DIED, EngineProcess
from mars_ray.engine.process.grammar_checker import GrammarChecker
from mars_ray.engine.process.messages import (
    Add,
    EngineFacts,
    EngineSpec,
    Failed,
    Launch,
    SetThresholds,
    Started,
    frame,
    read_message,
)
from mars_ray.engine.process.progress import Progress
from mars_ray.engine.process.restarts import Restarts
from mars_ray.engine.request import Request
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import AdapterError, ReplicaLostError

log = logging.getLogger(__name__)

BUFFERED_TOKENS = 2048
"""Maximum number of unread tokens of a request. A request with more is cancelled, to free its slot for others."""

STEP_SECONDS = 300
"""Maximum duration of the first step, while step times are unknown."""

STALL_SECONDS = 60.0
"""Seconds without progress, beyond the time of a step, after which an engine counts as stalled. On a machine that is
busy with other work, a healthy engine may get no processor for long, and its end costs a job all rows that it runs."""

STALLED = "the engine makes no progress and is replaced. Try again later."
RESTARTING = "the engine has ended and starts again. Try again later."
TELL_SECONDS = 1.0
"""Seconds before a stalled engine is killed, so that the error reaches the caller before the replica ends, too."""


class AsyncEngine:
    """An engine process, and those that take its place. Use it in one running event loop."""

    def __init__(self, *, buffered_tokens: int = BUFFERED_TOKENS, adapter_memory_gib: float | None = None) -> None:
        self._adapter_memory_gib = adapter_memory_gib
        self._streams = ChunkStreams(buffered_tokens)
        self._connection: EngineConnection | None = None
        """Connection to the last process that came up."""
        self.process: EngineProcess | None = None
        """The process of the engine, if this object has started it."""
        self.progress = Progress(stall_seconds=STALL_SECONDS, step_seconds=STEP_SECONDS)
        """Progress of the running process."""
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._relaunch: Callable[[], Awaitable[EngineFacts]] | None = None
        """Starts a new process; None if a process that ends is not replaced."""
        self._restarts = Restarts(0)
        self.obstacle: str | None = None
        """Reason why the engine decodes nothing now; None if it works."""
        self._stopped: EngineState | None = None
        """Last state of a process that has ended, while another one takes its place."""
        self._up = asyncio.Event()
        """Cleared while a new process takes the place of one that has ended."""
        self._up.set()
        self.adapters: Mapping[str, Path] = {}
        """Folders of the adapters with a name, by the names that requests use."""
        self._checker: GrammarChecker | None = None
        """Checks grammars for all processes. None if the model has no fast tokenizer."""
        self.gone = asyncio.Event()
        """Set when the process has ended and no other one takes its place."""

    @classmethod
    async def start(
        cls,
        spec: EngineSpec,
        *,
        stall_seconds: float = STALL_SECONDS,
        step_seconds: float = STEP_SECONDS,
        restarts: int = 0,
    ) -> tuple["AsyncEngine", EngineFacts]:
        """Start an engine process, which is killed when it stalls; `Progress` explains both limits in seconds.

        A process that ends is replaced up to `restarts` times within `RESTART_SECONDS`. Raises `ReplicaLostError` if
        the first process dies, and errors of the engine, such as `ModelError`, `AdapterError` or `ConfigError`.
        """
        engine = cls(adapter_memory_gib=spec.options.adapter_memory_gib)
        engine._restarts = Restarts(restarts)
        engine.adapters = {name: folder for name, folder in spec.adapters.items() if name is not None}
        engine._relaunch = partial(
            engine._launch, spec, partial(Progress, stall_seconds=stall_seconds, step_seconds=step_seconds)
        )
        try:
            facts = await engine._relaunch()
            adapters = engine._connected.adapters
            await adapters.set(engine.adapters)
            return engine, replace(facts, block=max(facts.block, adapters.block))
        except BaseException:  # also when the caller is cancelled
            await engine.close()
            raise

    def attach(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, checker: GrammarChecker | None = None
    ) -> EngineConnection:
        """Use the engine that `serve_engine` runs at the other end. Without `checker` it takes no grammars."""
        self._connection = connection = EngineConnection(
            writer, self._streams, checker=checker, adapter_memory_gib=self._adapter_memory_gib
        )
        self._reading = asyncio.create_task(self._read(reader, connection))
        return connection

    async def generate(self, request: Request, *, stream: bool = True) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of all n sequences as they arrive. The last chunk of each sequence has `finished` set.

        Without `stream`, each sequence arrives as a single chunk when it has ended.

        Raises `RequestError` or `QueueFullError` before decoding starts, `ReplicaLostError` if the engine died,
        `EngineHungError` if it hung because of this request, `AdapterError` if its adapter cannot be loaded again, and
        `SlowReaderError` if the caller read too slowly. To stop early, call `aclose` or cancel the task.
        """
        chunks = self._streams.open(request, whole=not stream)
        try:
            await self._up.wait()
            connection = self._connected
            async with connection.grammar_of(request), connection.adapter_of(request):
                connection.send(Add(request, stream))
                chunks.added = self.progress.checks
                try:
                    while (chunk := await chunks.next()) is not None:
                        yield chunk
                finally:
                    if chunks.open:
                        connection.cancel(request.id)
        finally:
            self._streams.close(request.id, chunks)

    def has(self, request_id: str) -> bool:
        """Return whether a request is running or waiting."""
        return request_id in self._streams

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self._streams

    async def state(self) -> EngineState:
        """Return the state of the engine after its current step.

        While a new process starts in place of one that has ended, return the last state of that one. Raises
        `ReplicaLostError`.
        """
        try:
            state = self._stopped or await self._connected.state()
        except ReplicaLostError:
            if self._stopped is None:
                raise
            state = self._stopped
        return replace(state, restarts=self._restarts.counts())

    def set_thresholds(self, by_class: Mapping[str, float]) -> None:
        """Set the thresholds of classes from the next step on. The engine logs invalid values and ignores them.

        Raises `ReplicaLostError`.
        """
        self._connected.send(SetThresholds(by_class))

    async def set_adapters(self, folders: Mapping[str, Path]) -> None:
        """Use exactly the adapters in `folders`, keyed by name, besides the one without a name, if there is one.

        New adapters are loaded next to the steps. New requests use them once all are loaded and fit the model. Requests
        that have begun keep their adapter. A folder whose files have changed counts as a new adapter. Raises
        `AdapterError` for the first adapter that cannot be used, and `ReplicaLostError`; then nothing has changed.
        """
        await self._up.wait()
        adapters = self._connected.adapters
        await adapters.set(folders)
        self.adapters = adapters.folders

    async def close(self) -> None:
        """Kill the engine. Open streams end with a `ReplicaLostError`."""
        self._relaunch = None
        await _cancelled(self._restarting)
        await self._stop()
        self.obstacle = ENDED
        self._stopped = None
        self._up.set()
        if self._checker is not None:
            await self._checker.close()

    @property
    def _connected(self) -> EngineConnection:
        if self._connection is None:
            raise ReplicaLostError(ENDED)
        return self._connection

    async def _launch(self, spec: EngineSpec, new_progress: Callable[[], Progress]) -> EngineFacts:
        """Start a process, and return what it says of the engine."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = await EngineProcess.start(theirs)
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(frame(Launch(spec, os.environ | {"OMP_NUM_THREADS": str(spec.threads)})))
            event = await read_message(reader)
            if not isinstance(event, Started):
                raise event.error if isinstance(event, Failed) else ReplicaLostError(DIED)
        except BaseException:
            writer.close()
            raise
        if event.tokenizer is not None and self._checker is None:
            self._checker = GrammarChecker(event.tokenizer)
        self.attach(reader, writer, self._checker)
        self.progress = new_progress()
        self._watching = asyncio.create_task(self._end_if_stalled())
        return event.facts

    async def _stop(self) -> None:
        """Kill the process, and wait until it has ended."""
        if self.process is not None:
            self.process.kill()
        await _cancelled(self._reading)
        await _cancelled(self._watching)
        if self._connection is not None:
            self._connection.close()
        if self.process is not None:
            await self.process.wait()

    async def _replace(self) -> None:
        """Start a new process in place of the one that has ended, until one comes up or too many have ended."""
        assert self._relaunch is not None
        again = True
        while again:
            await self._stop()
            try:
                await self._relaunch()
                await self._load_adapters_again()
            except ReplicaLostError:
                again = self._may_restart()
            except Exception:
                log.exception("the engine cannot be started again")
                again = False
            else:
                log.warning("a new engine process has taken the place of the one that ended")
                self.obstacle = self._stopped = None
                self._up.set()
                return
        await self._stop()
        self.obstacle = ENDED
        self._stopped = None
        self.gone.set()
        self._up.set()

    async def _load_adapters_again(self) -> None:
        """Load the adapters into a new process, except those whose files are no longer usable."""
        adapters = self._connected.adapters
        folders = dict(self.adapters)
        while adapters.folders != folders:
            try:
                await adapters.set(folders)
            except AdapterError as error:
                if error.adapter not in folders:
                    raise
                log.error("%s", error)
                del folders[error.adapter]
        self.adapters = folders

    def _may_restart(self) -> bool:
        """Note the end of a process, and return whether another one may take its place."""
        reason = "stalled" if self.obstacle == STALLED else "ended"
        return self._relaunch is not None and self._restarts.allow(reason, asyncio.get_running_loop().time())

    async def _read(self, reader: asyncio.StreamReader, connection: EngineConnection) -> None:
        """Deliver what the process sends until it has ended, then have another one take its place."""
        await connection.deliver(reader)
        log.error("the engine process has ended")
        connection.close()
        if not self._up.is_set():  # this process is a replacement that has not come up
            return
        if self._may_restart():
            self._up.clear()
            self.obstacle = self.obstacle or RESTARTING
            self._stopped = self.progress.state and self.progress.state.stopped(self.obstacle)
            self._restarting = asyncio.create_task(self._replace())
        else:
            self.obstacle = ENDED
            self.gone.set()

    async def _end_if_stalled(self) -> None:
        assert self.process is not None
        try:
            reason = await self.progress.until_stalled(self._connected.state)
        except ReplicaLostError:
            return
        log.error("the engine makes no progress and is replaced: %s", reason)
        self.obstacle = STALLED
        if self._streams.fail_suspect(self.progress):
            await asyncio.sleep(TELL_SECONDS)
        self.process.kill()


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

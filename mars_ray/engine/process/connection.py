"""The connection to one engine process: orders go out, and what comes back reaches those who wait for it."""

import asyncio
from collections import deque
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

from mars_ray.engine.process.adapter_store import AdapterStore
from mars_ray.engine.process.chunk_streams import LOST, ChunkStreams
from mars_ray.engine.process.grammar_checker import GrammarChecker
from mars_ray.engine.process.grammar_store import GrammarStore
from mars_ray.engine.process.messages import (
    AdapterLoaded,
    AskState,
    Cancel,
    Order,
    Prepared,
    Refused,
    frame,
    read_message,
)
from mars_ray.engine.request import Request
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import ReplicaLostError

ENDED = "the engine has ended and takes no more requests."


class EngineConnection:
    """One engine process, with the adapters and grammars that it holds. Use it in one event loop.

    `streams` are those of requests sent to the process, and of others that wait. Without a `checker`, grammars are
    sent to the engine unchecked, which refuses them if its tokenizer supports none.
    """

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        streams: ChunkStreams,
        *,
        checker: GrammarChecker | None = None,
        adapter_memory_gib: float | None = None,
    ) -> None:
        self._writer = writer
        self._streams = streams
        self._states: deque[asyncio.Future[EngineState]] = deque()
        self.adapters = AdapterStore(self.send, adapter_memory_gib)
        self._grammars = None if checker is None else GrammarStore(checker, self.send)

    def send(self, order: Order) -> None:
        """Send an order. Raises `ReplicaLostError` if the process has ended."""
        if self._writer.is_closing():
            raise ReplicaLostError(ENDED)
        self._writer.write(frame(order))

    def cancel(self, request_id: str) -> None:
        """End a request in the process, if the process runs."""
        with suppress(ReplicaLostError):
            self.send(Cancel(request_id))

    async def state(self) -> EngineState:
        """Return the state of the engine after its current step. Raises `ReplicaLostError`."""
        answer: asyncio.Future[EngineState] = asyncio.get_running_loop().create_future()
        self.send(AskState())
        self._states.append(answer)
        return await answer

    def grammar_of(self, request: Request) -> AbstractAsyncContextManager[None]:
        """Keep the grammar of a request compiled in the engine during the `with` block."""
        grammar = request.sampling.grammar
        if grammar is None or self._grammars is None:
            return nullcontext()
        return self._grammars.use(grammar, request.tenant)

    def adapter_of(self, request: Request) -> AbstractAsyncContextManager[None]:
        """Keep the adapter of a request in memory during the `with` block."""
        adapter = request.decode.adapter
        return nullcontext() if adapter is None else self.adapters.use(adapter)

    async def deliver(self, reader: asyncio.StreamReader) -> None:
        """Deliver what the process sends, until it has ended."""
        while (event := await read_message(reader)) is not None:
            match event:
                case EngineState() as state:
                    answer = self._states.popleft()
                    if not answer.done():
                        answer.set_result(state)
                case Prepared(grammar, error):
                    assert self._grammars is not None
                    self._grammars.compiled(grammar, error)
                case AdapterLoaded() as loaded:
                    self.adapters.loaded(loaded)
                case Refused(request_id, error):
                    self._streams.fail(request_id, error)
                case list() as chunks:
                    for slow in self._streams.deliver(chunks):
                        self.cancel(slow)

    def close(self) -> None:
        """Send nothing more, and fail everything that waits for the process with a `ReplicaLostError`."""
        self._writer.close()
        self._streams.lose()
        self.adapters.lose(ReplicaLostError(LOST))
        if self._grammars is not None:
            self._grammars.lose(ReplicaLostError(LOST))
        for answer in self._states:
            if not answer.done():
                answer.set_exception(ReplicaLostError(LOST))
        self._states.clear()

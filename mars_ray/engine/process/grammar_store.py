"""Keep the compiled grammars of an engine process within a memory limit.

`grammar_checker` measures a grammar before the engine compiles it. The engine compiles in a thread next to its steps,
and requests wait here for their grammar.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.process.grammar_checker import GrammarChecker
from mars_ray.engine.process.messages import Forget, Order, Prepare
from mars_ray.errors import MarsRayError

ROOM_BYTES = 128 << 20
"""Memory limit of compiled grammars. A large grammar is compiled only when it fits next to those in use."""
SMALL_BYTES = 1 << 20
"""Maximum size of a grammar that is compiled even if the limit is exceeded."""
LEAST_BYTES = 64 << 10
"""Minimum size that is counted for a grammar."""


@dataclass(slots=True, eq=False)
class _Compiled:
    ready: asyncio.Future[None] = field(init=False)
    compiles: bool = True
    """Whether the checker or the engine still works on the grammar."""
    bytes: int = 0
    users: int = 0
    """Number of requests that wait for the grammar or use it."""


class GrammarStore:
    """The compiled grammars of one engine; `send` sends orders to the engine. Use the store in one event loop."""

    def __init__(self, checker: GrammarChecker, send: Callable[[Order], None]) -> None:
        self._checker = checker
        self._send = send
        self._grammars = OrderedDict[GrammarSpec, _Compiled]()
        self._compiling: dict[GrammarSpec, asyncio.Future[None]] = {}
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def use(self, spec: GrammarSpec, tenant: str) -> AsyncIterator[None]:
        """Keep a grammar compiled in the engine during the block. Raises `GrammarError` or `ReplicaLostError`."""
        grammar = self._grammars.get(spec)
        if grammar is None:
            grammar = self._grammars[spec] = _Compiled()
            grammar.ready = asyncio.ensure_future(self._compile(spec, grammar, tenant))
            # Retrieve the exception even if all requests have ended; otherwise asyncio logs an error.
            grammar.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._grammars.move_to_end(spec)
        grammar.users += 1
        try:
            await asyncio.shield(grammar.ready)
            yield
        finally:
            grammar.users -= 1
            async with self._freed:
                self._freed.notify_all()

    def compiled(self, spec: GrammarSpec, error: MarsRayError | None) -> None:
        """Handle the engine's answer to `Prepare`."""
        if (compiling := self._compiling.pop(spec, None)) and not compiling.done():
            if error is None:
                compiling.set_result(None)
            else:
                compiling.set_exception(error)

    def lose(self, error: MarsRayError) -> None:
        """Fail the requests that wait for a grammar, because the engine process has ended."""
        for spec in list(self._compiling):
            self.compiled(spec, error)

    async def _compile(self, spec: GrammarSpec, grammar: _Compiled, tenant: str) -> None:
        try:
            async with self._checker.turn(tenant):
                size = max(LEAST_BYTES, await self._checker.cost(spec))
            async with self._freed:
                await self._freed.wait_for(lambda: self._make_room(size))
                grammar.bytes = size
            async with self._checker.turn(tenant):
                compiling = self._compiling[spec] = asyncio.get_running_loop().create_future()
                self._send(Prepare(spec))
                await compiling
        except BaseException:
            self._grammars.pop(spec, None)
            raise
        finally:
            grammar.compiles = False
            async with self._freed:  # its users may all have left meanwhile
                self._freed.notify_all()

    def _make_room(self, size: int) -> bool:
        """Drop unused grammars, least recently used first, until `size` bytes fit, and return whether they do.

        Small grammars always fit.
        """
        total = size + sum(grammar.bytes for grammar in self._grammars.values())
        for spec, grammar in list(self._grammars.items()):
            if total <= ROOM_BYTES:
                break
            if not grammar.users and not grammar.compiles:
                del self._grammars[spec]
                self._send(Forget(spec))
                total -= grammar.bytes
        return total <= ROOM_BYTES or size <= SMALL_BYTES

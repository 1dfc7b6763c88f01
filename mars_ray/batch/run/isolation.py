"""Find the row that kills a worker or an engine, by running suspects alone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pyarrow as pa

DEATHS = 3
"""Workers that may die with a row: the first two with its whole block, the last with that row alone."""


class WorkerDiedError(Exception):
    """A worker died before it answered."""


async def answer_block(
    rows: pa.Table,
    send: Callable[[pa.Table, bool], Awaitable[pa.Table]],
    give_up: Callable[[pa.Table], Awaitable[pa.Table]],
) -> list[pa.Table]:
    """Return the results of a block, which is sent row by row after two workers have died with it.

    `send` has rows answered by a worker, which does nothing else meanwhile if the second argument is true. It raises
    `WorkerDiedError`. A row that kills a worker when it is alone goes to `give_up`.
    """
    for _ in range(DEATHS - 1):
        with suppress(WorkerDiedError):
            return [await send(rows, False)]
    answered = []
    for number in range(rows.num_rows):
        row = rows.slice(number, 1)
        try:
            answered.append(await send(row, True))
        except WorkerDiedError:
            answered.append(await give_up(row))
    return answered


class Isolation:
    """A lock that suspects hold alone and all others share. Not thread-safe.

    Nobody else begins while a suspect waits, so suspects do not starve.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._working = 0
        self._suspects = 0

    @asynccontextmanager
    async def turn(self, *, alone: bool) -> AsyncIterator[None]:
        """Hold the lock within the block."""
        async with self._changed:
            if alone:
                self._suspects += 1
                try:
                    await self._changed.wait_for(lambda: not self._working)
                except BaseException:
                    self._suspects -= 1
                    self._changed.notify_all()
                    raise
            else:
                await self._changed.wait_for(lambda: not self._suspects)
            self._working += 1
        try:
            yield
        finally:
            async with self._changed:
                self._working -= 1
                self._suspects -= alone
                self._changed.notify_all()

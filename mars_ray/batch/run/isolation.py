"""Find the row that kills a worker or an engine, by running suspected rows alone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pyarrow as pa

DEATHS = 3
"""Maximum number of workers that may die on a row: the first two while running the row's whole block, the last while
running only the row."""


class WorkerDiedError(Exception):
    """A worker died before it answered."""


async def answer_block(
    rows: pa.Table,
    send: Callable[[pa.Table, bool], Awaitable[pa.Table]],
    give_up: Callable[[pa.Table], Awaitable[pa.Table]],
) -> list[pa.Table]:
    """Return the results of a block. After two workers have died with the block, its rows are sent one by one.

    `send` has a worker answer rows, and raises `WorkerDiedError` if the worker dies. If the second argument is true,
    the worker runs nothing else at the same time. A row that kills a worker while running alone is passed to `give_up`.
    """
    for _ in range(DEATHS - 1):
        with suppress(WorkerDiedError):
            return [await send(rows, False)]
    results = []
    for number in range(rows.num_rows):
        row = rows.slice(number, 1)
        try:
            results.append(await send(row, True))
        except WorkerDiedError:
            results.append(await give_up(row))
    return results


class Isolation:
    """A lock that suspected rows hold exclusively and all other rows share. Not thread-safe.

    No other row begins while a suspected row waits, so suspected rows do not starve.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._working = 0
        self._suspects = 0

    @asynccontextmanager
    async def turn(self, *, alone: bool) -> AsyncIterator[None]:
        """Hold the lock during the `with` block, exclusively if `alone` is true."""
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

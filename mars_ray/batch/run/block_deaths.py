"""What becomes of a block whose worker dies: rows are parsed in the worker, and one of them may be why it died."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pyarrow as pa

DEATHS = 3
"""Workers that may die with a row in them: the first two with its block, the last with that row alone."""


class WorkerDiedError(Exception):
    """A worker died before it had answered."""


async def answer_block(
    rows: pa.Table,
    send: Callable[[pa.Table, bool], Awaitable[pa.Table]],
    give_up: Callable[[pa.Table], Awaitable[pa.Table]],
) -> list[pa.Table]:
    """Return what `send` returns for a block, or for each of its rows once two workers died with the block.

    `send` has rows answered by some worker, with nothing else in it if its second argument is true, and raises
    `WorkerDiedError`. A row that a worker dies with when it is alone is given up.
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

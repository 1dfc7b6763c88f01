"""Work on one batch: check its file, answer its rows, write its results, each row once.

In:    a stored batch, stores, calls of the endpoint.
Out:   states of the batch, an output file and an errors file.
Never: answers a row that is done, works past the deadline, ends a batch before its results are stored, or changes the
       state or the results of a batch that another driver has taken over.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import IO

from mars_ray.batch.rows.row_tables import RowResult
from mars_ray.errors import StoredNotFoundError
from mars_ray.platform.batches.batch_output import BatchOutput, UsageSum
from mars_ray.platform.batches.batch_store import ENDED, JOB, BatchState, BatchStore, Status, StoredBatch
from mars_ray.platform.batches.file_store import FileStore
from mars_ray.platform.batches.input_file import BatchRow, InputCheck, check_input, rows_of
from mars_ray.platform.batches.protocol import window_seconds
from mars_ray.platform.batches.row_calls import RowCalls, refused_row
from mars_ray.platform.batches.storage_paths import RESULTS, result_id
from mars_ray.serve.http.streams import cancel_tasks

POLL_S = 1.0
"""Seconds between two checks of the deadline and of a request to cancel. Each check also writes the state."""
READ_ROWS = 256
"""Rows to read at a time."""
READ_BYTES = 4 << 20
"""Maximum bytes of the lines of the rows read at a time."""
ROWS_AHEAD = 64
"""Maximum number of queued rows of one batch, besides those that run."""
BYTES_AHEAD = 12 << 20
"""Maximum bytes of the lines of queued rows. Above it, the batch waits until a row ends."""
Errors = tuple[dict[str, str], ...]
"""Fields of `BatchError`."""
EXPIRED = "batch_expired"
KEY_TEXT = "the key that created the batch was removed or has expired. Create the batch again with a valid key."
EXPIRED_TEXT = "the row could not be answered before the completion window of the batch ended."


class BatchCounts:
    """Counts of batches and rows that the drivers of one runner have ended since it started."""

    def __init__(self) -> None:
        self.ended = Counter[str]()
        """Batches by the status with which they ended."""
        self.rows = Counter[str](completed=0, failed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTools:
    """Objects that all batches of a runner share."""

    files: FileStore
    batches: BatchStore
    calls: RowCalls
    max_rows: int
    max_body_bytes: int
    unix_clock: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    poll_s: float = POLL_S
    counts: BatchCounts = field(default_factory=BatchCounts)


class BatchRun:
    """Driver of one batch. While it holds the output, no other driver works on the batch."""

    def __init__(self, batch: StoredBatch, tools: BatchTools) -> None:
        self.batch = batch
        self._tools = tools
        # Once a driver has begun, its deadline follows a clock that does not jump. A clock that was set back gives a
        # batch at most its whole window again.
        window_s = window_seconds(batch.request.completion_window)
        left_s = min(batch.expires_at - tools.unix_clock(), window_s)
        self._ends_s = tools.clock() + left_s
        self._stop: Status | None = None
        self._errors: Errors = ()
        self.state = BatchState()
        """State that was written last."""

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative once it has passed."""
        return self._ends_s - self._tools.clock()

    async def run(self) -> None:
        """Work until the batch has ended. Raises `OutputError` if another driver works on it, and errors of the
        storage; another call, in this process or another, goes on where this one ended."""
        settings = {"input_file_id": self.batch.request.input_file_id}
        async with BatchOutput(self._tools.batches.folder(self.batch) / JOB, settings) as output:
            self.state = await asyncio.to_thread(self._tools.batches.state, self.batch)
            if self.state.status not in ENDED and await self._begin(output):
                await self._count(output)
                try:
                    await self._answer_rows(output)
                except StoredNotFoundError as error:  # the rows that are left cannot be known any more
                    self._stop, self._errors = "failed", _errors("file_not_found", str(error))
                await self._end(output)
        await asyncio.to_thread(self._tools.batches.forget, self.batch)

    async def _begin(self, output: BatchOutput) -> bool:
        """Check the input file unless an earlier driver has, and return whether the rows can run."""
        if self.state.status != "validating":
            return True
        try:
            check = await asyncio.to_thread(self._checked)
        except StoredNotFoundError as error:
            await self._fail(output, errors=_errors("file_not_found", str(error)))
            return False
        if check.errors:
            await self._fail(output, errors=tuple(error.model_dump() for error in check.errors))
            return False
        await self._write(output, status="in_progress", in_progress_at=self._now(), total=check.rows, model=check.model)
        return True

    def _checked(self) -> InputCheck:
        with self._input() as file:
            return check_input(
                file,
                self.batch.request.endpoint,
                max_rows=self._tools.max_rows,
                max_body_bytes=self._tools.max_body_bytes,
            )

    async def _answer_rows(self, output: BatchOutput) -> None:
        """Answer all rows that are not done, until the deadline or until the owner cancels."""
        await self._look(output)
        if self._stop:
            return
        answering = asyncio.create_task(self._answer_all(output))
        try:
            while not answering.done():
                await asyncio.wait([answering], timeout=max(0.0, min(self._tools.poll_s, self.left_s)))
                if not answering.done():
                    await self._look(output)
                    if self._stop:
                        return
            answering.result()
        finally:
            await cancel_tasks(answering)
            await self._count(output)

    async def _look(self, output: BatchOutput) -> None:
        if self.left_s <= 0:
            self._stop = "expired"
        elif await asyncio.to_thread(self._tools.batches.is_cancelled, self.batch):
            self._stop = "cancelled"
        elif not await self._tools.calls.caller.has_access(self.batch):
            self._stop, self._errors = "cancelled", _errors("key_not_valid", KEY_TEXT)
        else:
            await self._count(output)

    async def _answer_all(self, output: BatchOutput) -> None:
        running = dict[asyncio.Task[RowResult], int]()
        rows_max = self._tools.calls.in_flight + ROWS_AHEAD
        try:
            async with aclosing(self._undone_rows(output)) as groups:
                async for rows in groups:
                    for row in rows:
                        running[asyncio.create_task(self._tools.calls.answer(self.batch, row))] = len(row.line)
                        while len(running) >= rows_max or sum(running.values()) >= BYTES_AHEAD:
                            await _take_ended(output, running)
            while running:
                await _take_ended(output, running)
        finally:
            await cancel_tasks(*running)

    async def _undone_rows(self, output: BatchOutput) -> AsyncGenerator[list[BatchRow], None]:
        """Yield the rows that are not done, in groups. Raises `StoredNotFoundError` if the input file is gone."""
        with await self._opened_input() as file:
            rows = rows_of(file, self.batch.request.endpoint, max_body_bytes=self._tools.max_body_bytes)
            while group := await asyncio.to_thread(_next_rows, rows):
                undone = await output.undone([row.key for row in group])
                yield [row for row in group if row.key in undone]

    async def _end(self, output: BatchOutput) -> None:
        """Store the results and the last state of the batch."""
        if self._stop == "expired":
            await self._take_late(output)
        if self.state.finalizing_at is None:
            await self._write(output, status="finalizing", finalizing_at=self._now())
        await output.flush()
        results = await output.run(self._store_results)
        status: Status = self._stop or "completed"
        await self._write(output, status=status, errors=self._errors, **results, **{f"{status}_at": self._now()})

    async def _take_late(self, output: BatchOutput) -> None:
        """Write an error for each row that is not done."""
        try:
            async with aclosing(self._undone_rows(output)) as groups:
                async for rows in groups:
                    await output.take([refused_row(self.batch, row, EXPIRED, EXPIRED_TEXT) for row in rows])
        except StoredNotFoundError as error:
            self._errors = _errors("file_not_found", str(error))
        else:
            # An earlier driver may have been stopped after it had stored all rows, in time or with these errors.
            self._stop = "expired" if await output.has_error(EXPIRED_TEXT) else None
        await self._count(output)

    def _store_results(self, answers: Iterator[bytes], errors: Iterator[bytes]) -> Mapping[str, object]:
        """Write the two files, if they have lines, and return their ids and the usage as fields of the state."""
        used = UsageSum()
        expires = self.batch.request.output_expires_after
        expires_after_s = expires.seconds if expires else None
        results = dict[str, object]()
        contents = ((used.read(answers), self.state.completed), (errors, self.state.failed))
        for name, (lines, count) in zip(RESULTS, contents, strict=True):
            if count:
                id = result_id(self.batch.id, name)
                filename = f"{self.batch.id}_{name}.jsonl"
                self._tools.files.write(self.batch.owner, id, lines, filename, expires_after_s)
                results[f"{name}_file_id"] = id
        return results | {"usage": used.usage()}

    async def _count(self, output: BatchOutput) -> None:
        completed, failed = await output.counts()
        if (completed, failed) != (self.state.completed, self.state.failed):
            await self._write(output, completed=completed, failed=failed)

    async def _fail(self, output: BatchOutput, **fields: object) -> None:
        await self._write(output, status="failed", failed_at=self._now(), **fields)

    async def _write(self, output: BatchOutput, **fields: object) -> None:
        # A state that is written after another driver has ended the batch would stay, so the batch would never end.
        await output.check_driver()
        state = BatchState.model_validate(self.state.model_dump() | fields)
        await asyncio.to_thread(self._tools.batches.write_state, self.batch, state)
        counts = self._tools.counts
        counts.rows.update(completed=state.completed - self.state.completed, failed=state.failed - self.state.failed)
        if state.status in ENDED:
            counts.ended[state.status] += 1
        self.state = state

    async def _opened_input(self) -> IO[bytes]:
        opening = asyncio.create_task(asyncio.to_thread(self._input))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:  # nobody else would close what the thread still opens
            opening.add_done_callback(lambda opened: opened.exception() or opened.result().close())
            raise

    def _input(self) -> IO[bytes]:
        return self._tools.files.lines(self.batch.owner, self.batch.request.input_file_id)

    def _now(self) -> int:
        return int(self._tools.unix_clock())


def _errors(code: str, message: str) -> Errors:
    return ({"code": code, "message": message},)


async def _take_ended(output: BatchOutput, running: dict[asyncio.Task[RowResult], int]) -> None:
    """Store the results of rows that have ended, and remove them from `running`. Waits for at least one."""
    ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    await output.take([task.result() for task in ended])
    for task in ended:
        del running[task]


def _next_rows(rows: Iterator[BatchRow]) -> list[BatchRow]:
    group: list[BatchRow] = []
    held = 0
    try:
        for row in rows:
            group.append(row)
            held += len(row.line)
            if len(group) == READ_ROWS or held >= READ_BYTES:
                break
    except FileNotFoundError:
        raise StoredNotFoundError("the input file was removed while its rows ran.") from None
    return group

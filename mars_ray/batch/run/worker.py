"""Answer rows with one engine, and restart the engine when it dies.

In:    tables of rows, several at a time, so that the engine never runs empty between tables.
Out:   a result for each row.
Never: fails because of a row, or gives up on a row because another row killed the engine.
"""

import asyncio
import ctypes
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, TypeVar

from mars_ray.batch.rows.row_format import ParsedRow, RowFormat, parsed_row
from mars_ray.batch.rows.row_ids import RowId
from mars_ray.batch.rows.row_tables import RowResult, as_json
from mars_ray.batch.run.isolation import Isolation
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.errors import (
    BadRecordError,
    EngineHungError,
    MarsRayError,
    ReplicaLostError,
    RequestError,
    RunError,
    StepError,
)
from mars_ray.traces.engine_call import EngineCall

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_AHEAD = 16
"""Maximum number of rows that wait in the engine, so that a slot is taken as soon as it is free."""
PARSE_SECONDS = 10.0
"""Time limit for parsing a row and rendering its prompt. A conversation of a thousand messages takes milliseconds."""
DEATHS = 3
"""Maximum number of engines that may die one after another, either while starting or on the same row.

The first engine runs the row together with other rows; the later engines run the row alone."""
HANGS = 2
"""Number of engines that may hang because of one row. The first one may have hung for another reason."""


class Worker:
    """Answers rows with an engine, started by `start_engine`. No new row begins while the event `feeding` is cleared.

    Call `start` first. Not thread-safe.
    """

    def __init__(
        self,
        name: str,
        start_engine: Callable[[], Awaitable[AsyncEngine]],
        feeding: asyncio.Event,
    ) -> None:
        self._name = name
        self._start_engine = start_engine
        self._feeding = feeding
        self._room = asyncio.Semaphore(0)
        self._ready_s = 0.0
        self._isolation = Isolation()
        self._numbers = count()
        self._parsing = InterruptAfter(PARSE_SECONDS)
        self._engine: asyncio.Future[AsyncEngine] | None = None

    async def start(self) -> None:
        """Start the engine. Raises the errors of `start_engine`."""
        engine = await self._live_engine()
        self._room = asyncio.Semaphore((await engine.state()).max_num_seqs + LOOK_AHEAD)
        self._ready_s = time.monotonic()

    async def answer(self, row_format: RowFormat, row_ids: Sequence[RowId], raws: Sequence[bytes]) -> list[RowResult]:
        """Return the results in the order of the rows. Raises `RunError` if no engine can be started."""
        return list(await asyncio.gather(*map(partial(self._result, row_format), row_ids, raws)))

    def give_up(self, row_format: RowFormat, row_ids: Sequence[RowId], raws: Sequence[bytes]) -> list[RowResult]:
        """Return error results for rows that killed workers, without parsing the rows."""
        error = RunError(f"{DEATHS} workers died one after another with this row, even when the row ran alone")
        return [self._failed(row_format, row_id, raw, error) for row_id, raw in zip(row_ids, raws, strict=True)]

    async def close(self) -> None:
        """Stop the engine."""
        if self._engine is not None and self._engine.done() and self._engine.exception() is None:
            await self._engine.result().close()

    async def _live_engine(self) -> AsyncEngine:
        """Return the engine. Start a new engine first if the last one is dead."""
        if self._engine is None or (self._engine.done() and self._dead(self._engine)):
            self._engine = asyncio.ensure_future(self._restart(self._engine))
        return await asyncio.shield(self._engine)

    async def _restart(self, dead: asyncio.Future[AsyncEngine] | None) -> AsyncEngine:
        if dead is not None and not dead.exception():
            await dead.result().close()
        for _ in range(DEATHS - 1):
            with suppress(ReplicaLostError):
                return await self._start_engine()
        return await self._start_engine()

    @staticmethod
    def _dead(engine: asyncio.Future[AsyncEngine]) -> bool:
        return engine.exception() is not None or engine.result().gone.is_set()

    async def _result(self, row_format: RowFormat, row_id: RowId, raw: bytes) -> RowResult:
        try:
            if row_id.repeated:
                raise BadRecordError(f"an earlier row has the same id {row_id.id!r}; give each row its own")
            async with self._room:
                row = await self._parse(row_format, row_id.id, raw)
                answers, call = await self._decode(row)
                return self._answered(row_format, row_id.key, row, answers, call)
        except (BadRecordError, RequestError, StepError, EngineHungError, ReplicaLostError) as error:
            return self._failed(row_format, row_id, raw, error)

    async def _parse(self, row_format: RowFormat, id: str, raw: bytes) -> ParsedRow:
        try:
            return await self._parsing.run(partial(parsed_row, row_format, id, raw))
        except TimeoutError:
            raise BadRecordError(
                f"the chat template did not render it within {PARSE_SECONDS:g} s; shorten it, or correct the template"
            ) from None

    def _failed(self, row_format: RowFormat, row_id: RowId, raw: bytes, error: MarsRayError) -> RowResult:
        return RowResult(
            key=row_id.key,
            error=as_json(row_format.error_record(row_id, raw, error)),
            reason=str(error),
            **self._origin(),
        )

    def _origin(self) -> dict[str, Any]:
        return {"worker": self._name, "age_s": time.monotonic() - self._ready_s}

    def _answered(
        self, row_format: RowFormat, key: bytes, row: ParsedRow, answers: list[Chunk], call: EngineCall
    ) -> RowResult:
        ends = [answer.finished for answer in answers if answer.finished is not None]
        for end in ends:
            if end.error is not None:
                raise end.error
        try:
            records = tuple(as_json(record) for record in row_format.output_records(row, answers))
        except Exception as error:  # one row must not stop the job
            log.exception("the answer of row %s cannot be written", row.id)
            raise StepError(f"the answer cannot be written ({type(error).__name__}: {error}); report this") from error
        return RowResult(
            key=key,
            records=records,
            tokens=tuple(end.tokens for end in ends),
            forwards=tuple(end.forwards for end in ends),
            cut=sum(end.reason == "length" for end in ends),
            threshold=min(answer.threshold for answer in answers),
            sequences=tuple(call.sequences),
            **self._origin(),
        )

    async def _decode(self, row: ParsedRow) -> tuple[list[Chunk], EngineCall]:
        """Decode a row and return its sequences, each as one chunk, and their times."""
        hung = 0
        for deaths in range(DEATHS):
            async with self._isolation.turn(alone=deaths > 0):
                await self._feeding.wait()
                try:
                    engine = await self._live_engine()
                except MarsRayError as error:
                    raise RunError(f"no engine can be started: {error}") from error
                try:
                    # Ray may send a block twice, so requests need fresh ids.
                    request = replace(row.request, id=str(next(self._numbers)))
                    call = EngineCall(request)
                    chunks = []
                    async with aclosing(engine.generate(request, stream=False)) as sequences:
                        async for chunk in sequences:
                            call.add(chunk)
                            chunks.append(chunk)
                    return sorted(chunks, key=attrgetter("index")), call
                except (EngineHungError, ReplicaLostError) as error:
                    hung += isinstance(error, EngineHungError)
                    if hung == HANGS:
                        raise
                    log.warning("the engine died while it decoded row %s: %s", row.id, error)
        raise ReplicaLostError(f"the engine died {DEATHS} times with this row, even when the row ran alone")


class _TooLong(BaseException):
    """Error that the timer raises in the thread of the function. `except Exception` does not catch this error."""


class InterruptAfter:
    """Runs one function at a time, and interrupts a function that takes longer than `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result. Raises `TimeoutError` if it takes too long. Native code is not
        interrupted."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._limited, work)

    def _limited(self, work: Callable[[], T]) -> T:
        thread = threading.get_ident()
        changing = threading.Lock()
        ended = False

        def interrupt() -> None:
            with changing:
                if not ended:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooLong))

        timer = threading.Timer(self._seconds, interrupt)
        timer.daemon = True
        timer.start()
        try:
            try:
                return work()
            finally:
                with changing:
                    ended = True
                timer.cancel()
        except _TooLong:
            raise TimeoutError from None

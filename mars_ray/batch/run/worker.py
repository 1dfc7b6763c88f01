"""Rows -> outcomes, by one engine that is started anew when it dies.

In:    identified rows, batch after batch; several batches at a time, so that the engine never runs empty between them.
Out:   an outcome for every row.
Never: fails because of a row; gives up on one that did nothing but stand beside the one that killed the engine.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import count
from typing import Any

from mars_ray.batch.rows.answer import answer_of
from mars_ray.batch.rows.form import Form, Row
from mars_ray.batch.rows.identity import Identity
from mars_ray.batch.rows.outcome import Outcome, as_json
from mars_ray.batch.run.isolation import Isolation
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.errors import BadRecordError, MarsRayError, ReplicaLostError, RequestError, RunError, StepError

log = logging.getLogger(__name__)

LOOK_AHEAD = 16
"""Rows that wait in the engine, so that a row of its batch that becomes free is taken at once."""
DEATHS = 3
"""Of engines: so many may die one after the other while they start, or with a row in them: first one row of many, then
that row alone."""


class Worker:
    """`start_engine` does what it says; while `feeding` is cleared, no row begins.

    Call `start` first; use it within one event loop.
    """

    def __init__(
        self, name: str, form: Form, start_engine: Callable[[], Awaitable[AsyncEngine]], feeding: asyncio.Event
    ) -> None:
        self._name, self._form, self._start_engine = name, form, start_engine
        self._places, self._ready_s = asyncio.Semaphore(0), 0.0
        self._isolation, self._numbers, self._feeding = Isolation(), count(), feeding
        self._engine: asyncio.Future[AsyncEngine] | None = None

    async def start(self) -> None:
        """Start the engine. Raises what starting it raises."""
        engine = await self._engine_now()
        self._places = asyncio.Semaphore((await engine.state()).rows + LOOK_AHEAD)
        self._ready_s = time.monotonic()

    async def answer(self, identities: Sequence[Identity], raws: Sequence[bytes]) -> list[Outcome]:
        """Return the outcomes, in the order of the rows. Raises `RunError` when no engine starts."""
        return list(await asyncio.gather(*map(self._outcome, identities, raws)))

    async def close(self) -> None:
        """Stop the engine."""
        if self._engine is not None and self._engine.done() and self._engine.exception() is None:
            await self._engine.result().close()

    async def _engine_now(self) -> AsyncEngine:
        """Return the engine, started when there is none that lives."""
        if self._engine is None or (self._engine.done() and self._dead(self._engine)):
            self._engine = asyncio.ensure_future(self._after(self._engine))
        return await asyncio.shield(self._engine)

    async def _after(self, dead: asyncio.Future[AsyncEngine] | None) -> AsyncEngine:
        if dead is not None and not dead.exception():
            await dead.result().close()
        for _ in range(DEATHS - 1):
            with suppress(ReplicaLostError):
                return await self._start_engine()
        return await self._start_engine()

    @staticmethod
    def _dead(engine: asyncio.Future[AsyncEngine]) -> bool:
        return engine.exception() is not None or engine.result().gone.is_set()

    async def _outcome(self, identity: Identity, raw: bytes) -> Outcome:
        try:
            if identity.repeated:
                raise BadRecordError(f"its id {identity.id!r} is that of an earlier row; give each row one of its own")
            async with self._places:
                row = self._form.parse(identity.id, raw)
                return self._answered(identity.key, row, await self._decoded(row))
        except (BadRecordError, RequestError, StepError, ReplicaLostError) as error:
            return Outcome(
                key=identity.key,
                error=as_json(self._form.refused(identity.id, raw, error)),
                kind=_kind(error),
                **self._origin(),
            )

    def _origin(self) -> dict[str, Any]:
        return {"worker": self._name, "age_s": time.monotonic() - self._ready_s}

    def _answered(self, key: bytes, row: Row, sequences: list[Chunk]) -> Outcome:
        answers = [answer_of(each) for each in sequences]
        failed = next((each.finished.error for each in answers if each.finished.error), None)
        if failed is not None:
            raise failed
        return Outcome(
            key=key,
            records=tuple(as_json(record) for record in self._form.answered(row, answers)),
            tokens=tuple(each.finished.tokens for each in answers),
            forwards=tuple(each.finished.forwards for each in answers),
            threshold=min(each.threshold for each in answers),
            **self._origin(),
        )

    async def _decoded(self, row: Row) -> list[Chunk]:
        """Return the sequences of a row."""
        for deaths in range(DEATHS):
            async with self._isolation.turn(alone=deaths > 0):
                await self._feeding.wait()
                try:
                    engine = await self._engine_now()
                except MarsRayError as error:
                    raise RunError(f"no engine starts: {error}") from error
                try:
                    # A batch that Ray hands out twice may be here twice.
                    request = replace(row.request, id=str(next(self._numbers)))
                    async with aclosing(engine.generate(request, whole=True)) as sequences:
                        return sorted([each async for each in sequences], key=_index)
                except ReplicaLostError:
                    log.warning("the engine died while row %s was in it", row.id)
        raise ReplicaLostError(f"the engine died {DEATHS} times while this row was in it, the last ones with it alone")


def _index(sequence: Chunk) -> int:
    return sequence.index


def _kind(error: MarsRayError) -> str:
    """Return what is alike in the reasons of one kind: names and numbers differ."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", str(error))[:200]

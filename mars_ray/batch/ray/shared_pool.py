"""Ray shell: pipeline stage that answers rows with decoders. Stages with equal settings share their decoders.

A named actor owns the decoders. The first stage that runs starts the actor. The actor ends itself and its decoders some
seconds after the last stage has stopped sending heartbeats. It reports the backlog of all its stages together.
"""

import asyncio
import hashlib
import os
import threading
import time
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pyarrow as pa
import ray
from ray.exceptions import ActorDiedError

from mars_ray.batch.ray.control_loop import ControlLoop
from mars_ray.batch.ray.decoder_pool import DecoderPool, PoolSettings, start_decoders
from mars_ray.batch.rows.row_tables import failure_in, from_table
from mars_ray.batch.rows.stage_rows import rows_to_answer, with_answers
from mars_ray.batch.run.live_stats import RowBacklog
from mars_ray.control.core.ray_controller import BATCH
from mars_ray.errors import RunError, UnavailableError
from mars_ray.ray_actor import ActorClient, SharedActor, remote

BEAT_S = 2.0
ENDED_S = 3 * BEAT_S
"""Seconds without a heartbeat from a stage after which its backlog does not count any more."""
IDLE_S = 15
"""Seconds without a heartbeat from any stage after which the decoders are stopped."""
POOLS = 3
"""Number of pools that may die one after another with the same block before the stage fails."""


class SharedPool(SharedActor):
    """Actor that owns the decoders and reports the backlog of all stages to their controller."""

    def __init__(self, app: str, settings: PoolSettings) -> None:
        self._decoders = start_decoders(settings, app)
        self._backlogs: dict[str, tuple[float, RowBacklog]] = {}
        """Time of the last heartbeat of each stage, and its backlog then."""
        self._control_loop = ControlLoop(app, settings.control, self._tokens_left, settings.deadline_s, lambda: None)
        self._control_loop.__enter__()
        super().__init__(self)

    async def beat(self, stage: str, backlog: RowBacklog) -> list[Any]:
        """Record a heartbeat and the backlog of a stage, and return the decoders.

        The time until the deadline begins with the first stage, and again with the first one after all have ended.
        """
        if stage not in self._backlogs and not self._running():
            self._control_loop.start_deadline()
        self._backlogs[stage] = time.monotonic(), backlog
        return self._decoders

    def _running(self) -> list[RowBacklog]:
        now_s = time.monotonic()
        return [backlog for heard_s, backlog in list(self._backlogs.values()) if now_s - heard_s < ENDED_S]

    def _tokens_left(self) -> float:
        return sum(backlog.tokens_left for backlog in self._running())

    def unused(self) -> bool:
        """Return whether no stage has sent a heartbeat for `IDLE_S` seconds."""
        return self.silent_s >= IDLE_S

    async def remove(self) -> None:
        """End the controller of the stages."""
        await asyncio.to_thread(self._control_loop.__exit__, None, None, None)


class RayPool(ActorClient):
    """Client of a shared pool. Use it within one event loop.

    A pool that died starts again with its first heartbeat. Ray does not restart it, because its decoders die with it.
    """

    WITHIN_S = None
    RESTARTS = 0
    SILENT = "the shared decoders do not answer."

    beat = remote(SharedPool.beat)

    def __init__(self, app: str, settings: PoolSettings) -> None:
        super().__init__(SharedPool, app, app, settings)


class AnsweredRows:
    """Actor of one stage. It passes blocks on to the shared decoders and does not import torch.

    A thread sends heartbeats, which keep the decoders alive. `rows` is the total number of rows that will arrive, or
    None if unknown.
    """

    def __init__(self, settings: PoolSettings, row_format: bytes, rows: int | None, raise_errors: bool) -> None:
        self._settings = settings
        self._row_format = row_format
        self._raise_errors = raise_errors
        self._backlog = RowBacklog(rows=rows)
        job = ray.get_runtime_context().get_job_id()
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
        self._app = f"{BATCH}stage-{job}-{digest}"
        self._stage = f"{os.getpid()}-{uuid4().hex}"
        self._decoders: DecoderPool | None = None
        self._pool = RayPool(self._app, settings)
        threading.Thread(target=lambda: asyncio.run(self._beat_forever()), name="stage-beat", daemon=True).start()

    async def __call__(self, block: pa.Table) -> pa.Table:
        """Return the rows of a block with their answers.

        Raises `RequestError` for a row without an answer if `raise_errors` is set, and `RunError` if no engine can be
        started.
        """
        self._backlog.arrived += block.num_rows
        answered = await self._answer(rows_to_answer(block))
        if reason := failure_in(answered):
            raise RunError(reason)
        results = from_table(answered)
        self._backlog.done += len(results)
        self._backlog.tokens += sum(sum(result.tokens) for result in results)
        return with_answers(block, results, raise_errors=self._raise_errors)

    async def _answer(self, rows: pa.Table) -> pa.Table:
        """Return the result of `Decoder.answer`. Raises `RunError` if `POOLS` pools die one after another."""
        for _ in range(POOLS):
            try:
                if self._decoders is None:
                    self._decoders = DecoderPool(await self._pool.beat(self._stage, self._backlog))
                return await self._decoders.answer(rows, self._row_format)
            except (ActorDiedError, UnavailableError):  # the pool has just ended or was killed
                self._decoders = None
        raise RunError(f"the decoders died {POOLS} times with the same block.")

    async def _beat_forever(self) -> None:
        pool = RayPool(self._app, self._settings)  # a client belongs to one event loop
        while True:
            with suppress(UnavailableError):
                await pool.beat(self._stage, self._backlog)
            await asyncio.sleep(BEAT_S)

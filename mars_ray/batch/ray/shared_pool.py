"""The decoders that all stages of a job share which ask for the same ones (shell).

They belong to a named actor, which starts them for the first stage that runs and ends them with itself, some seconds
after the last one was heard of. So they outlive neither their job nor, for long, their use.
"""

import asyncio
import hashlib
import os
import threading
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pyarrow as pa
import ray
from ray.exceptions import ActorDiedError, RayError

from mars_ray.batch.ray.control_loop import ControlLoop
from mars_ray.batch.ray.decoder_pool import DecoderPool, PoolSettings, start_decoders
from mars_ray.batch.run.stage_backlog import StageBacklog
from mars_ray.control.core.ray_controller import BATCH
from mars_ray.errors import RunError
from mars_ray.ray_private import NAMESPACE

BEAT_S = 2.0
IDLE_S = 15
"""Seconds after which decoders end that no stage asks for."""
POOLS = 3
"""So many pools may die one after the other with a block in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPoolSettings:
    """The decoders that stages share, and what their controller goes by."""

    pool: PoolSettings
    deadline_s: float | None


class SharedPool:
    """What runs in the actor: the decoders, and the loop that tells their controller what is left."""

    def __init__(self, app: str, settings: SharedPoolSettings) -> None:
        self._decoders = list(start_decoders(settings.pool, app).values())
        self._backlogs: dict[str, StageBacklog] = {}
        self._silent_s = 0
        self._control_loop = ControlLoop(
            app, settings.pool.control, self._tokens_left, settings.deadline_s, lambda _: None
        )
        self._control_loop.__enter__()
        self._watching = asyncio.get_event_loop().create_task(self._end_when_idle())

    async def beat(self, stage: str, backlog: StageBacklog) -> list[Any]:
        """Hear that a stage is there, and what is left for it; return the decoders."""
        self._silent_s = 0
        self._backlogs[stage] = backlog
        return self._decoders

    def _tokens_left(self) -> float:
        return sum(each.tokens_left for each in list(self._backlogs.values()))

    async def _end_when_idle(self) -> None:
        # Seconds are counted, not read off a clock: on a machine that was suspended everybody has been silent for long.
        while self._silent_s < IDLE_S:
            await asyncio.sleep(1)
            self._silent_s += 1
        await asyncio.to_thread(self._control_loop.__exit__, None, None, None)
        ray.kill(ray.get_runtime_context().current_actor)


class SharedDecoders:
    """The decoders as one stage sees them; while it lives, they do."""

    def __init__(self, settings: SharedPoolSettings, backlog: StageBacklog) -> None:
        self._settings, self.backlog = settings, backlog
        job = ray.get_runtime_context().get_job_id()
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
        self._app, self._stage = f"{BATCH}stage-{job}-{digest}", f"{os.getpid()}-{uuid4().hex}"
        self._decoders: DecoderPool | None = None
        self._pool: Any = None
        threading.Thread(target=self._stay, name="stage-beat", daemon=True).start()

    async def answer(self, rows: pa.Table, row_format: bytes) -> pa.Table:
        """Return what `Decoder.answer` does. Raises `RunError` when pools keep dying."""
        for _ in range(POOLS):
            try:
                if self._decoders is None:
                    self._decoders = DecoderPool(await self._beat())
                return await self._decoders.answer(rows, row_format)
            except ActorDiedError:  # the pool ended just now, or somebody ended it
                self._decoders = self._pool = None
        raise RunError(f"the decoders died {POOLS} times while a block was in them.")

    def _beat(self) -> Any:
        if self._pool is None:
            actor = ray.remote(SharedPool).options(
                name=self._app, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0
            )
            self._pool = actor.remote(self._app, self._settings)
        return self._pool.beat.remote(self._stage, self.backlog)

    def _stay(self) -> None:
        while True:
            try:
                ray.get(self._beat())
            except RayError:
                self._decoders = self._pool = None
            time.sleep(BEAT_S)

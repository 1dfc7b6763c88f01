"""Ray shell: actor that decodes rows with an engine in a separate process."""

import asyncio
import os
import pickle
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import ray

from mars_ray.adapter.card import unnamed
from mars_ray.batch.rows.row_format import RowFormat
from mars_ray.batch.rows.row_tables import failure_table, from_row_table, to_table
from mars_ray.batch.run.live_stats import engine_name
from mars_ray.batch.run.worker import Worker
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.lease import Lease, run_heartbeats
from mars_ray.control.core.ray_controller import RayController
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.errors import MarsRayError, ReplicaLostError
from mars_ray.model.sources.ray_folder import SharedFolder

if TYPE_CHECKING:
    from mars_ray.batch.rows.row_format import RowFormatSettings
    from mars_ray.model.folder import ResolvedModel


class Decoder:
    """An actor with one engine. Its methods may run concurrently."""

    def __init__(
        self, spec: EngineSpec, model: SharedFolder, adapter: SharedFolder | None, plan: ControlPlan, app: str
    ) -> None:
        self._spec = spec
        self._plan = plan
        self._model = model
        self._adapter = adapter
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._app = app
        self._controller = RayController(app, plan)
        self._row_formats: dict[bytes, asyncio.Task[RowFormat]] = {}
        self._feeding = asyncio.Event()
        self._reports = self._answered = 0
        """Number of reports, and the number of the newest one that was answered or failed."""
        self._heartbeat: asyncio.Task[None] | None = None
        # Threads do not speed up tokenizing a single prompt, and the engines need the cores.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def start(self) -> None:
        """Start the engine in the background, and return at once so that the first rows can be read meanwhile."""
        # The constructor does not start the engine: if a constructor fails, Ray restarts the actor endlessly.
        _ = self._worker

    async def answer(self, rows: pa.Table, row_format: bytes) -> pa.Table:
        """Return a table of results in the order of the rows, or a failure table.

        `row_format` holds the settings of the row format and the resolved model, pickled so that processes without
        torch can pass them on.
        """
        try:
            worker, opened_format = await self._ready(row_format)
            return to_table(await worker.answer(opened_format, *from_row_table(rows)))
        except MarsRayError as error:
            return failure_table(str(error))

    async def give_up(self, rows: pa.Table, row_format: bytes) -> pa.Table:
        """Return error results for rows that killed workers, without parsing the rows."""
        try:
            worker, opened_format = await self._ready(row_format)
            return to_table(worker.give_up(opened_format, *from_row_table(rows)))
        except MarsRayError as error:
            return failure_table(str(error))

    async def _ready(self, row_format: bytes) -> tuple[Worker, RowFormat]:
        if row_format not in self._row_formats:
            self._row_formats[row_format] = asyncio.create_task(self._open_format(row_format))
        return await asyncio.shield(self._worker), await asyncio.shield(self._row_formats[row_format])

    async def _open_format(self, row_format: bytes) -> RowFormat:
        return await asyncio.to_thread(_open, row_format, (await asyncio.shield(self._fetched_spec)).folder)

    @cached_property
    def _worker(self) -> asyncio.Task[Worker]:
        """The worker, which starts at the first use."""
        return asyncio.create_task(self._start_worker())

    @cached_property
    def _fetched_spec(self) -> asyncio.Task[EngineSpec]:
        """The engine settings for this node, whose folders are fetched at the first use."""
        return asyncio.create_task(asyncio.to_thread(self._local_spec))

    async def _start_worker(self) -> Worker:
        self._spec = await asyncio.shield(self._fetched_spec)
        worker = Worker(self._name, self._engine, self._feeding)
        self._feeding.set()
        await worker.start()
        return worker

    def _local_spec(self) -> EngineSpec:
        """Return the engine settings with the paths of the model and adapter folders on this node."""
        return replace(
            self._spec,
            folder=self._model.here(),
            adapters=unnamed(None if self._adapter is None else self._adapter.here()),
        )

    async def _engine(self) -> AsyncEngine:
        engine, _ = await AsyncEngine.start(self._spec)
        # Each engine numbers its reports from 0, so each engine needs its own lease.
        lease = Lease(engine_name(self._name, time.monotonic_ns()), self._plan)
        self._heartbeat = asyncio.create_task(self._beat(engine, lease))
        return engine

    async def _beat(self, engine: AsyncEngine, lease: Lease) -> None:
        try:
            with suppress(ReplicaLostError):
                await run_heartbeats(engine, lease, self._report)
        finally:
            self._feeding.set()  # rows start the next engine, whose first report may pause them again

    async def _report(self, report: ReplicaReport) -> Directive:
        """Report to the controller. Rows begin unless the newest answer pauses them, also if the report fails."""
        self._reports += 1
        number, paused = self._reports, False
        try:
            directive = await self._controller.handle_report(report)
            paused = directive.paused
            return directive
        finally:
            if number > self._answered:  # an older report may be answered, or fail, after a newer one
                self._answered = number
                if paused:
                    self._feeding.clear()
                else:
                    self._feeding.set()


def _open(row_format: bytes, folder: Path) -> RowFormat:
    # Hide torch to halve the import time of transformers, because the engine is starting meanwhile and needs the cores.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    opened: tuple[RowFormatSettings, ResolvedModel] = pickle.loads(row_format)
    settings, model = opened
    return settings.open(replace(model, folder=folder))

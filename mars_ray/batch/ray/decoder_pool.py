"""The decoders of a job, and the blocks of rows that go to them (shell).

Who only passes blocks on never loads torch, which saves 300 MB and some seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy

from mars_ray.batch.rows.row_result import failure_in, failure_table
from mars_ray.batch.run.options import WorkerOptions
from mars_ray.control.settings import ControlPlan
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.errors import ClusterError
from mars_ray.model.sources.ray_folder import SharedFolder, share_folder
from mars_ray.ray_cluster import cluster_cpus
from mars_ray.ray_private import NAMESPACE

if TYPE_CHECKING:
    from mars_ray.batch.run.engine_plan import EnginePlan

BLOCK_ROWS = 64
"""Rows of a block as a rule."""
CALLS = 8
"""Blocks a decoder works on at a time. A block leaves when its last row is done, so there are several times as many
rows as an engine decodes together: it never runs empty, however long single rows take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Decoders to start."""

    spec: EngineSpec
    model: SharedFolder
    """The model folder of the spec; nodes that lack it fetch it."""
    adapter: SharedFolder | None
    control: ControlPlan
    count: int
    """Number of decoders."""
    cpus: float
    """CPUs that each asks Ray for."""
    gpus: float


def pool_settings(engines: "EnginePlan", cpus: float) -> PoolSettings:
    """Return the decoders that a plan asks for; its folders lie on this node."""
    return PoolSettings(
        spec=engines.spec(),
        model=share_folder(engines.model),
        adapter=None if engines.adapter is None else share_folder(engines.adapter),
        control=engines.control,
        count=engines.workers.count,
        cpus=cpus,
        gpus=engines.workers.gpus,
    )


def start_decoders(settings: PoolSettings, app: str) -> dict[str, Any]:
    """Return the handles, by name, of decoders that belong to this process and report to the controller of `app`.

    One that dies is started again, and its blocks are done again.
    """
    from mars_ray.batch.ray.decoder import Decoder

    names = [f"decoder:{app}:{uuid4().hex}" for _ in range(settings.count)]
    actor = ray.remote(num_cpus=settings.cpus, num_gpus=settings.gpus, max_restarts=-1, max_task_retries=-1)(Decoder)
    decoders = {
        name: actor.options(name=name, namespace=NAMESPACE).remote(
            settings.spec, settings.model, settings.adapter, settings.control, app
        )
        for name in names
    }
    for each in decoders.values():
        each.start.remote()
    return decoders


def calls_of(calls: int) -> ActorPoolStrategy:
    """Return the pool of the one actor that has so many blocks of a dataset answered at a time."""
    return ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=calls, max_concurrent_calls_per_actor=calls)


class AnsweredBlocks:
    """Has the blocks of a job's input answered by the decoders of these names.

    Names and not handles: Ray could not start an actor again whose arguments refer to what is lost. `row_format` are
    the pickled settings of the format of the rows.
    """

    def __init__(self, decoders: Sequence[str], row_format: bytes) -> None:
        handles = [ray.get_actor(name, namespace=NAMESPACE) for name in decoders]
        self._pool, self._row_format = DecoderPool(handles), row_format

    async def __call__(self, rows: pa.Table) -> pa.Table:
        """Return a table of results for a table of rows, or the reason why there can be none."""
        if reason := failure_in(rows):
            return failure_table(reason)
        return await self._pool.answer(rows, self._row_format)


class DecoderPool:
    """Gives each block to the decoder that has the fewest; use it within one event loop."""

    def __init__(self, decoders: Sequence[Any]) -> None:
        self._decoders, self._busy = decoders, [0] * len(decoders)

    async def answer(self, rows: pa.Table, row_format: bytes) -> pa.Table:
        """Return what `Decoder.answer` does."""
        place = min(range(len(self._busy)), key=self._busy.__getitem__)
        self._busy[place] += 1
        try:
            return await self._decoders[place].answer.remote(rows, row_format)
        finally:
            self._busy[place] -= 1


def cluster_share(count: int, *, of: int) -> float:
    """Return the CPUs for each of `count` decoders that all have one part `of` the cluster, at most one each.

    They have whole CPUs together, or none: of a CPU that lacks a part nobody else can use the rest, and an actor of the
    pipeline and the task that feeds it would wait for each other on a small cluster.
    """
    return min(1.0, math.floor(100 * (cluster_cpus() // of) / count) / 100)


def check_cluster(workers: WorkerOptions) -> None:
    """Raise a `ClusterError` for a cluster that will never have room for the workers."""
    there, wanted = cluster_cpus(), workers.count * (workers.cpus or 1.0)
    if wanted > there:
        raise ClusterError(
            f"{workers.count} workers need {wanted:g} CPUs, the cluster has {there:g}. "
            "Lower workers or join a larger cluster with RAY_ADDRESS."
        )
    gpus = ray.cluster_resources().get("GPU", 0.0)
    if workers.count * workers.gpus > gpus:
        raise ClusterError(
            f"{workers.count} workers need {workers.count * workers.gpus:g} GPUs, the cluster has {gpus:g}. "
            "Lower workers or join a larger cluster with RAY_ADDRESS."
        )

"""The decoders of a job, and the blocks of rows that go to them (shell).

Who only passes blocks on never loads torch, which saves 300 MB and some seconds.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mars_ray.batch.rows.row_result import failure_in, failure_table
from mars_ray.batch.run.block_deaths import WorkerDiedError, answer_block
from mars_ray.batch.run.isolation import Isolation
from mars_ray.batch.run.placement import NodeResources, Place, place_workers
from mars_ray.control.settings import ControlPlan
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.model.sources.ray_folder import SharedFolder, share_folder
from mars_ray.ray_cluster import is_shared
from mars_ray.ray_private import NAMESPACE, free_resources

if TYPE_CHECKING:
    from mars_ray.batch.run.engine_plan import EnginePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Decoders to start."""

    places: tuple[tuple[Place, EngineSpec], ...]
    """Where each runs, and what."""
    model: SharedFolder
    """The model folder of the specs; nodes that lack it fetch it."""
    adapter: SharedFolder | None
    control: ControlPlan
    gpus: float
    """GPUs of each."""


def choose_places(engines: "EnginePlan", *, rows: int | None = None, part: int = 1) -> tuple[Place, ...]:
    """Return where workers run on this cluster, see `place_workers`.

    On a cluster that others may use, too, they share what is free now; where no node has a whole CPU they wait for it.
    """
    nodes = {node["NodeID"]: _resources(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    if is_shared():
        free = {name: _resources(each) for name, each in free_resources().items() if name in nodes}
        if any(each.cpus >= 1 for each in free.values()):
            nodes |= free
    return tuple(place_workers(nodes, engines.workers, threads=engines.threads, rows=rows, part=part))


def _resources(found: dict[str, float]) -> NodeResources:
    return NodeResources(found.get("CPU", 0.0), found.get("GPU", 0.0))


def pool_settings(engines: "EnginePlan", places: tuple[Place, ...]) -> PoolSettings:
    """Return the decoders that a plan asks for; its folders lie on this node."""
    return PoolSettings(
        places=tuple((place, engines.spec(place.threads)) for place in places),
        model=share_folder(engines.model.folder),
        adapter=None if engines.adapter is None else share_folder(engines.adapter),
        control=engines.control,
        gpus=engines.workers.gpus,
    )


def start_decoders(settings: PoolSettings, app: str) -> dict[str, Any]:
    """Return the handles, by name, of decoders that belong to this process and report to the controller of `app`.

    One that dies is started again, elsewhere if its node is gone.
    """
    from mars_ray.batch.ray.decoder import Decoder

    actor = ray.remote(max_restarts=-1, num_gpus=settings.gpus)(Decoder)
    decoders = {}
    for place, spec in settings.places:
        name = f"decoder:{app}:{uuid4().hex}"
        # Elsewhere too where others have taken what the node had: a place is a wish.
        node = NodeAffinitySchedulingStrategy(place.node, soft=True, _spill_on_unavailable=True)
        decoders[name] = actor.options(
            name=name, namespace=NAMESPACE, num_cpus=place.cpus, scheduling_strategy=node
        ).remote(spec, settings.model, settings.adapter, settings.control, app)
        decoders[name].start.remote()
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
    """Gives each block to the decoder that has the fewest, and to another if that dies; use it in one event loop."""

    def __init__(self, decoders: Sequence[Any]) -> None:
        self._decoders, self._blocks = decoders, [0] * len(decoders)
        self._up = set[int]()
        self._changed = asyncio.Event()
        self._joining = dict[int, asyncio.Task[None]]()
        self._turns = [Isolation() for _ in decoders]

    async def answer(self, rows: pa.Table, row_format: bytes) -> pa.Table:
        """Return what `Decoder.answer` does. Raises `ActorDiedError` when all are dead for good."""
        if not self._joining:
            self._joining = {place: asyncio.create_task(self._join(place)) for place in range(len(self._decoders))}

        async def send(rows: pa.Table, alone: bool) -> pa.Table:
            return await self._call("answer", rows, row_format, alone=alone)

        async def give_up(rows: pa.Table) -> pa.Table:
            while True:
                with suppress(WorkerDiedError):  # nothing of the row is looked at: it died of something else
                    return await self._call("give_up", rows, row_format, alone=False)

        answered = await answer_block(rows, send, give_up)
        failed = next((each for each in answered if failure_in(each)), None)
        return pa.concat_tables(answered) if failed is None else failed

    async def _call(self, method: str, rows: pa.Table, row_format: bytes, *, alone: bool) -> pa.Table:
        """Call a method of the decoder that has the fewest blocks. Raises `WorkerDiedError`."""
        while True:
            place = await self._least_busy()
            self._blocks[place] += 1
            try:
                async with self._turns[place].turn(alone=alone):
                    if place in self._up:  # it may have died while this waited
                        return await getattr(self._decoders[place], method).remote(rows, row_format)
            except RayActorError as error:
                if place in self._up:
                    self._up.remove(place)
                    self._joining[place] = asyncio.create_task(self._join(place))
                raise WorkerDiedError from error
            finally:
                self._blocks[place] -= 1

    async def _least_busy(self) -> int:
        while not self._up:
            self._changed.clear()
            if all(task.done() for task in self._joining.values()):
                await asyncio.gather(*self._joining.values())
            await self._changed.wait()
        return min(self._up, key=self._blocks.__getitem__)

    async def _join(self, place: int) -> None:
        """Wait until a decoder runs: it may be long where a node is gone and no other has room."""
        try:
            await self._decoders[place].start.remote()
            self._up.add(place)
        finally:
            self._changed.set()

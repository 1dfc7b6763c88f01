"""Ray shell: start the decoders of a job, and send blocks of rows to them.

A decoder is an actor, and its engine is a process of its own. The actor is needed because Ray places it, restarts it on
another node, and brings rows and results. The engine is not inside the actor, because a crash or a hang of the engine
must not lose the rows of the actor, and because parsing rows would hold up the steps of the engine. A stage of a user's
pipeline is one more actor, which Ray Data starts and ends with the stage, while stages share the decoders.
Processes that only pass on blocks do not import torch, which saves 300 MB and a few seconds in each process.
"""

import asyncio
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mars_ray.batch.rows.row_tables import failure_in
from mars_ray.batch.run.isolation import Isolation, WorkerDiedError, answer_block
from mars_ray.batch.run.placement import NodeResources, Place, place_workers
from mars_ray.control.control_settings import ControlPlan
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.model.sources.ray_folder import SharedFolder, share_folder
from mars_ray.ray_cluster import is_shared
from mars_ray.ray_private import free_resources

if TYPE_CHECKING:
    from mars_ray.batch.run.engine_plan import EnginePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Settings of the decoders to start."""

    places: tuple[tuple[Place, EngineSpec], ...]
    """Place and engine settings of each decoder."""
    model: SharedFolder
    """Model folder. Nodes that do not have it fetch a copy."""
    adapter: SharedFolder | None
    control: ControlPlan
    gpus: float
    """Number of GPUs of each decoder."""
    deadline_s: float | None = None
    """Deadline of the stages that share the decoders, if they have one."""


def choose_places(engines: "EnginePlan", *, rows: int | None = None, part: int = 1) -> tuple[Place, ...]:
    """Return a place on this cluster for each worker; see `place_workers`.

    On a shared cluster, workers use only resources that are free now. If no node has a free CPU, workers may also use
    busy resources, and wait until these are free.
    """
    nodes = {node["NodeID"]: _resources(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    if is_shared():
        free = {name: _resources(resources) for name, resources in free_resources().items() if name in nodes}
        if any(node.cpus >= 1 for node in free.values()):
            nodes |= free
    return tuple(place_workers(nodes, engines.workers, threads=engines.threads, rows=rows, part=part))


def _resources(resources: dict[str, float]) -> NodeResources:
    return NodeResources(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def pool_settings(engines: "EnginePlan", places: tuple[Place, ...]) -> PoolSettings:
    """Return the settings of the decoders for a plan. The model and adapter folders must be on this node."""
    return PoolSettings(
        places=tuple((placement, engines.spec(placement.threads)) for placement in places),
        model=share_folder(engines.model.folder),
        adapter=None if engines.adapter is None else share_folder(engines.adapter),
        control=engines.control,
        gpus=engines.workers.gpus,
    )


def start_decoders(settings: PoolSettings, app: str) -> list[Any]:
    """Start decoders that report to the controller of `app`, and return their handles.

    Ray restarts a decoder that dies, on another node if the decoder's node is lost. Decoders end with this process.
    """
    from mars_ray.batch.ray.decoder import Decoder

    actor = ray.remote(max_restarts=-1, num_gpus=settings.gpus)(Decoder)
    decoders = []
    for placement, spec in settings.places:
        # The node is only a preference, because another job may have taken its CPUs.
        node = NodeAffinitySchedulingStrategy(placement.node, soft=True, _spill_on_unavailable=True)
        decoder = actor.options(num_cpus=placement.cpus, scheduling_strategy=node).remote(
            spec, settings.model, settings.adapter, settings.control, app
        )
        decoder.start.remote()
        decoders.append(decoder)
    return decoders


def answered_blocks(
    blocks: Iterable[pa.Table], decoders: Sequence[Any], row_format: bytes, *, at_once: int
) -> Iterator[pa.Table]:
    """Yield the results of the blocks in the order in which they arrive, with up to `at_once` blocks under way.

    `row_format` holds the pickled settings of the row format and the resolved model. If the caller stops early, no
    further block is read. Raises the errors of `blocks` and `DecoderPool.answer`.
    """
    wanted = True
    room = threading.Semaphore(at_once)
    unread = iter(blocks)
    answers = SimpleQueue[pa.Table | BaseException | None]()

    def read() -> pa.Table | None:
        room.acquire()
        return next(unread, None) if wanted else None

    async def send() -> None:
        pool = DecoderPool(decoders)

        async def answer(block: pa.Table) -> None:
            answers.put(await pool.answer(block, row_format))

        try:
            async with asyncio.TaskGroup() as group:
                # Blocks are read in a thread, so no answer waits for a block that is slow to read.
                while (block := await asyncio.to_thread(read)) is not None:
                    group.create_task(answer(block))
            answers.put(None)
        except BaseExceptionGroup as errors:
            answers.put(errors.exceptions[0])

    threading.Thread(target=lambda: asyncio.run(send()), name="decoders", daemon=True).start()
    try:
        while (answer := answers.get()) is not None:
            if isinstance(answer, BaseException):
                raise answer
            yield answer
            room.release()
    finally:
        wanted = False
        room.release()


class DecoderPool:
    """Sends each block to the decoder with the fewest blocks. If a decoder dies, its blocks go to others. Not
    thread-safe."""

    def __init__(self, decoders: Sequence[Any]) -> None:
        self._decoders = decoders
        self._blocks = [0] * len(decoders)
        self._up = set[int]()
        self._changed = asyncio.Event()
        self._joining = dict[int, asyncio.Task[None]]()
        self._turns = [Isolation() for _ in decoders]

    async def answer(self, rows: pa.Table, row_format: bytes) -> pa.Table:
        """Return the result of `Decoder.answer`. Raises `ActorDiedError` if no decoder can be restarted."""
        if not self._joining:
            self._joining = {number: asyncio.create_task(self._join(number)) for number in range(len(self._decoders))}

        async def send(rows: pa.Table, alone: bool) -> pa.Table:
            return await self._call("answer", rows, row_format, alone=alone)

        async def give_up(rows: pa.Table) -> pa.Table:
            while True:
                with suppress(WorkerDiedError):  # the row was not parsed, so something else killed the worker
                    return await self._call("give_up", rows, row_format, alone=False)

        answered = await answer_block(rows, send, give_up)
        failed = next((table for table in answered if failure_in(table)), None)
        return pa.concat_tables(answered) if failed is None else failed

    async def _call(self, method: str, rows: pa.Table, row_format: bytes, *, alone: bool) -> pa.Table:
        """Call a method of the decoder with the fewest blocks. Raises `WorkerDiedError` if the decoder dies."""
        while True:
            number = await self._least_busy()
            self._blocks[number] += 1
            try:
                async with self._turns[number].turn(alone=alone):
                    if number in self._up:  # the decoder may have died in the meantime
                        return await getattr(self._decoders[number], method).remote(rows, row_format)
            except RayActorError as error:
                if number in self._up:
                    self._up.remove(number)
                    self._joining[number] = asyncio.create_task(self._join(number))
                raise WorkerDiedError from error
            finally:
                self._blocks[number] -= 1

    async def _least_busy(self) -> int:
        while not self._up:
            self._changed.clear()
            if all(task.done() for task in self._joining.values()):
                await asyncio.gather(*self._joining.values())
            await self._changed.wait()
        return min(self._up, key=self._blocks.__getitem__)

    async def _join(self, number: int) -> None:
        """Wait until a decoder is running, which can take long if its node is lost and no other node has room."""
        try:
            await self._decoders[number].start.remote()
            self._up.add(number)
        finally:
            self._changed.set()

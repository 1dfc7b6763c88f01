"""Ray shell around `Replica`: a replica of the engine on Ray Serve."""

import asyncio
import os
from collections.abc import Sequence
from functools import partial

import ray
from ray import serve

from mars_ray.control.core.lease import EVERY_S, Lease, run_heartbeats
from mars_ray.control.core.ray_controller import RayController
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.errors import ReplicaLostError
from mars_ray.model.resolve import resolve_model
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.serve.ray.adapters import get_adapters
from mars_ray.serve.ray.autoscaling import autoscaling_stats
from mars_ray.serve.ray.endpoint_controller import endpoint_controller
from mars_ray.serve.replicas.engine_metrics import EngineMetrics
from mars_ray.serve.replicas.followed_adapters import FollowedAdapters
from mars_ray.serve.replicas.replica import Replica

STEP_SECONDS = 30
"""Seconds after which the first step counts as hung."""
STALL_SECONDS = 10.0
"""Seconds without progress, beyond the time of a step, after which an engine counts as stalled. Callers wait."""
RESTARTS = 3
"""Engine processes that are replaced within a minute. When one more ends, the replica exits, and Serve starts another
one, perhaps on another node."""


class EngineReplica(Replica):
    """One engine, its heartbeats to the controller, and its adapters as the cluster wants them."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Serve awaits the constructor
        folder = resolve_model(config.model)
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
        plan = config.plan(folder)
        spec = config.engine_spec(folder, cpus)
        engine, facts = await AsyncEngine.start(
            spec, stall_seconds=STALL_SECONDS, step_seconds=STEP_SECONDS, restarts=RESTARTS
        )
        replica = serve.get_replica_context()
        self._name = replica.replica_id.unique_id
        self._lease = Lease(self._name, plan, price_per_hour=config.engine.replica_price)
        controller = endpoint_controller(config, folder)
        adapters = FollowedAdapters(engine, partial(get_adapters, config.controller or replica.app_name))
        await adapters.refresh()
        self._tasks = [
            asyncio.create_task(_end_with(engine)),
            asyncio.create_task(_beat(engine, self._lease, controller)),
            asyncio.create_task(adapters.run()),
        ]
        model = ModelInfo(
            name=config.model_name,
            created=int((folder / "config.json").stat().st_mtime),
            engine=facts,
            served_names=config.served_model_names,
        )
        super().__init__(engine, model, EngineMetrics(model=config.model_name, replica=self._name), adapters)

    async def running(self, requests: Sequence[str]) -> tuple[str, list[str], str | None]:
        """Return this replica's name, which `requests` it is processing, and its obstacle. Gateways call this to check
        liveness."""
        return self._name, [name for name in requests if self.has(name)], self._engine.obstacle

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the input of the autoscaling policy `by_capacity`. Serve calls this."""
        return autoscaling_stats(self._lease, idle=self._engine.idle)

    async def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._engine.close()


async def _beat(engine: AsyncEngine, lease: Lease, controller: RayController) -> None:
    """Send heartbeats, also after the engine's process was replaced."""
    while True:
        try:
            await run_heartbeats(engine, lease, controller.handle_report)
        except ReplicaLostError:
            await asyncio.sleep(EVERY_S)


async def _end_with(engine: AsyncEngine) -> None:
    """Exit when the engine ends for good, so that routers skip this replica and Serve starts another."""
    await engine.gone.wait()
    os._exit(1)

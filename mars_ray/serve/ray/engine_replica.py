"""Ray shell around `LocalEngineClient`: a replica of the engine on Ray Serve."""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import ray
from ray import serve

from mars_ray.control.core.ray_controller import RayController
from mars_ray.control.replica.heartbeat import run_heartbeats
from mars_ray.control.replica.lease import Lease
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError
from mars_ray.model.resolve import resolve_model
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.serve.ray.adapters import get_adapters
from mars_ray.serve.ray.autoscaling import DESIRED
from mars_ray.serve.replicas.engine_client import LocalEngineClient
from mars_ray.serve.replicas.engine_metrics import EngineMetrics
from mars_ray.serve.replicas.followed_adapters import FollowedAdapters

STEP_SECONDS = 30
"""Seconds after which a step counts as hung. Its requests then go to another engine."""


class EngineReplica:
    """One engine. Its methods return errors as values, because Ray's transports treat exceptions differently."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Serve awaits the constructor
        folder = resolve_model(config.model)
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
        engine, facts = await AsyncEngine.start(config.engine_spec(folder, cpus), step_seconds=STEP_SECONDS)
        self._engine = engine
        self._ending = asyncio.create_task(_end_with(engine))
        replica = serve.get_replica_context()
        self._name = replica.replica_id.unique_id
        plan = config.plan(folder)
        self._lease = Lease(self._name, plan, price_per_hour=config.engine.replica_price)
        controller = RayController(config.controller or replica.app_name, plan, config.audit_folder)
        self._beating = asyncio.create_task(run_heartbeats(engine, self._lease, controller.handle_report))
        created = int((folder / "config.json").stat().st_mtime)
        self._adapters = FollowedAdapters(engine, partial(get_adapters, config.controller or replica.app_name))
        await self._adapters.refresh()
        self._following = asyncio.create_task(self._adapters.run())
        self._client = LocalEngineClient(
            engine,
            ModelInfo(
                name=config.model_name,
                created=created,
                engine=facts,
                served_names=config.served_model_names,
            ),
            EngineMetrics(model=config.model_name, replica=self._name),
        )

    async def stream(self, request: Request) -> AsyncGenerator[Chunk | MarsRayError, None]:
        """Yield the chunks of a request, then the error if it failed."""
        try:
            await self._adapters.look_up(request.decode.adapter)
            async with aclosing(self._client.stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except MarsRayError as error:
            yield error

    async def collect(self, request: Request) -> AsyncGenerator[list[Chunk] | MarsRayError, None]:
        """Yield the chunks of a request in parts, then the error if it failed."""
        try:
            await self._adapters.look_up(request.decode.adapter)
            async with aclosing(self._client.collect(request)) as parts:
                async for part in parts:
                    yield part
        except MarsRayError as error:
            yield error

    async def model_info(self) -> ModelInfo:
        """Return the facts about the model, with the names of its adapters now."""
        return replace(await self._client.model_info(), adapters=tuple(self._engine.adapters))

    async def metrics(self) -> str:
        """Return the metrics of this replica."""
        return "".join(await self._client.metrics())

    async def running(self, requests: Sequence[str]) -> tuple[str, list[str]]:
        """Return this replica's name and which `requests` it is processing. Gateways call this to check
        liveness."""
        return self._name, [name for name in requests if self._engine.has(name)]

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the desired number of replicas for `serve.ray.autoscaling`, or an empty dict without a controller.

        The controller desires 0 while nothing is asked for, and also for requests before it knows the engine's speed.
        """
        directive = self._lease.directive
        known = directive and (directive.desired_replicas or self._engine.idle)
        return {DESIRED: float(directive.desired_replicas)} if directive and known else {}

    async def check_health(self) -> None:
        """Wait for the current step of the engine to end. If this takes too long, Serve starts another replica."""
        await self._client.ready()

    async def __del__(self) -> None:
        self._beating.cancel()
        self._following.cancel()
        await self._client.close()


async def _end_with(engine: AsyncEngine) -> None:
    """Exit when the engine ends, so that routers skip this replica and Serve starts another."""
    await engine.gone.wait()
    os._exit(1)

"""Ray shell around `BatchRunner`: the deployment that works on the batches of an endpoint.

Serve restarts it if its process or node dies. It finds the batches that have not ended in the storage, so it needs
nothing from before. During an update an old and a new replica may run at the same time; the driver of a batch keeps the
other one out.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack

from ray import serve
from ray.serve.handle import DeploymentHandle

from mars_ray.control.cluster_load import Backlog
from mars_ray.errors import MarsRayError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.platform.batches.batch_store import Stores
from mars_ray.platform.batches.row_caller import make_batch_runner
from mars_ray.platform.platform_config import PlatformConfig
from mars_ray.platform.ray.actors import RayResponseStore
from mars_ray.platform.ray.gateway import make_meter, make_models
from mars_ray.serve.http.streams import cancel_tasks

log = logging.getLogger(__name__)

NO_WORK = Backlog(tokens=0.0, seconds=None)
NICENESS = 10
"""Increase of the process's niceness, so that on a machine with few CPUs its work delays no gateway and no engine."""


class Batches:
    """The runner of batches, as one replica that reserves no CPU."""

    async def __init__(  # type: ignore[misc]
        self, engines: DeploymentHandle, config: PlatformConfig, models: DeploymentHandle
    ) -> None:
        os.nice(NICENESS)
        stores = Stores.below(config.storage, config.storage_limits)
        assert stores is not None, "the application has this deployment only if it has storage"
        controller = config.controller or str(serve.get_replica_context().app_name)
        config = config.model_copy(update={"controller": controller})
        meter = make_meter(config, "batches")
        self._served = make_models(engines, config, models, meter, name="batches")
        self._models = AsyncExitStack()
        if meter:
            await self._models.enter_async_context(meter.running())
        await self._models.enter_async_context(self._served.running())
        responses = RayResponseStore(controller)
        runner = make_batch_runner(self._served, responses, stores, config, meter=meter, report=self._report)
        self._running = asyncio.create_task(runner.run())

    async def _report(self, backlogs: Mapping[str, Backlog]) -> None:
        for model in self._served.names():
            try:
                await self._served.control(model).update_backlog(backlogs.get(model, NO_WORK), paused=False)
            except (MarsRayError, ApiError) as error:
                log.debug("the controller of %s does not know the work that is left: %s", model, error)

    async def check_health(self) -> None:
        """Raise the error of a runner that has failed, so that Serve starts another one."""
        if self._running.done():
            self._running.result()

    async def __del__(self) -> None:
        await cancel_tasks(self._running)
        await self._models.aclose()

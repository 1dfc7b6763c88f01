"""The actor of a job that has one engine, without Ray."""

import asyncio
from pathlib import Path

from mars_ray.batch.ray.decoder import Decoder
from mars_ray.control.core.lease import Lease
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.model.sources.ray_folder import SharedFolder
from tests.control.control_samples import plan_of
from tests.factories.engine import engine_spec


def test_rows_begin_again_if_the_engine_dies_while_the_job_is_paused(model_folder: Path) -> None:
    """They start the next engine, whose reports pause them again if callers still need the cluster."""

    async def test() -> None:
        spec, plan = engine_spec(model_folder), plan_of()
        decoder = Decoder(spec, SharedFolder(path=model_folder, node_id=""), None, plan, "job")
        engine, _ = await AsyncEngine.start(spec)
        assert engine.process is not None
        engine.process.kill()
        await engine.gone.wait()
        assert not decoder._feeding.is_set()
        await decoder._beat(engine, Lease("one", plan))
        assert decoder._feeding.is_set()
        await engine.close()

    asyncio.run(test())

"""Controllers of batch jobs and of online applications, side by side on a real cluster."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
import ray

from mars_ray.control.backlog import Backlog
from mars_ray.control.core.ray_controller import BATCH, RayController, online_statuses, remove_controllers
from mars_ray.control.replica.yielding import Yielding
from mars_ray.engine.service_class import ServiceClass
from tests.control.control_samples import class_state, plan_of, report

pytestmark = pytest.mark.ray
JOB = plan_of(ServiceClass(floor=0.5), policy="deadline")
TOO_MUCH = Backlog(tokens=1e9, seconds=100.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()


@pytest.fixture
def job() -> Iterator[RayController]:
    yield RayController(f"{BATCH}one", JOB)
    remove_controllers(f"{BATCH}one")


@pytest.fixture
def online() -> Iterator[RayController]:
    yield RayController("shop", plan_of())
    remove_controllers("shop")


def test_what_a_driver_tells_reaches_the_workers(job: RayController) -> None:
    async def told() -> None:
        status = await job.update_backlog(TOO_MUCH, paused=True)
        assert (status.policy, status.replicas) == ("deadline", ())
        first = await job.handle_report(report(1, 0.0, class_state(running=4)))
        assert first.paused and first.reasons["standard"]
        await job.update_backlog(TOO_MUCH, paused=False)
        assert not (await job.handle_report(report(2, 1.0))).paused

    asyncio.run(told())


def test_batch_work_sees_online_controllers_alone_and_yields_to_them(job: RayController, online: RayController) -> None:
    async def seen() -> None:
        await job.handle_report(report(1, 0.0, class_state(waiting=3)))
        assert await online_statuses() == []
        await online.handle_report(report(1, 0.0, class_state(waiting=3)))
        found = await online_statuses()
        assert [each.policy for each in found] == ["capacity"]
        assert Yielding(recover_s=30).follow(found, 0.0)

    asyncio.run(seen())

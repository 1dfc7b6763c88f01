"""Controllers of batch jobs and of online applications, side by side on a real cluster."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from mars_ray.cli.control import clear_threshold, set_threshold, status
from mars_ray.control.cluster_load import Backlog
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.batch_job import Yielding
from mars_ray.control.core.ray_controller import (
    BATCH,
    RayController,
    find_controllers,
    online_statuses,
    remove_controllers,
)
from mars_ray.control.core.status import ClusterStatus
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import ConfigError, RunError, UnavailableError
from tests.control.control_samples import class_state, plan_of, report

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
JOB = plan_of(ServiceClass(floor=0.5), policy="deadline")
TOO_MUCH = Backlog(tokens=1e9, seconds=100.0)


@contextmanager
def controller(app: str, plan: ControlPlan) -> Iterator[RayController]:
    """One that answers: on a busy machine its process is up later than those who ask are ready to wait."""
    started = RayController(app, plan)

    async def until_it_answers() -> None:
        while True:
            with suppress(UnavailableError):
                await started.status()
                return

    asyncio.run(until_it_answers())
    try:
        yield started
    finally:
        remove_controllers(app)


@pytest.fixture
def job() -> Iterator[RayController]:
    with controller(f"{BATCH}one", JOB) as started:
        yield started


def test_what_a_driver_tells_reaches_the_workers(job: RayController) -> None:
    async def told() -> None:
        status = await job.update_backlog(TOO_MUCH, paused=True)
        assert (status.policy, status.replicas) == ("deadline", ())
        first = await job.handle_report(report(1, 0.0, class_state(running=4)))
        assert first.paused
        await job.update_backlog(TOO_MUCH, paused=False)
        assert not (await job.handle_report(report(2, 1.0))).paused

    asyncio.run(told())


def test_batch_work_sees_online_controllers_alone_and_yields_to_them(job: RayController) -> None:
    waiting = report(1, 0.0, class_state(waiting=3), replica="shop's")

    async def found_after_report_to(controller: RayController) -> list[ClusterStatus]:
        await controller.handle_report(waiting)
        # Endpoints of earlier tests may still have controllers on this cluster.
        statuses = await online_statuses()
        return [status for status in statuses if any(each.replica == "shop's" for each in status.replicas)]

    assert not asyncio.run(found_after_report_to(job))
    with controller("shop", plan_of()) as online:
        [found] = asyncio.run(found_after_report_to(online))
    assert found.policy == "capacity"
    assert Yielding(recover_s=30).follow([found], 0.0)


def test_operators_reach_a_controller_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # this process is connected already
    with controller("shop", plan_of()):
        set_threshold(0.9, controller="shop")
        status(controller="shop")
        assert "0.9" in capsys.readouterr().out
        clear_threshold(controller="shop")
        with pytest.raises(ConfigError, match=r"threshold is 1\.7"):
            set_threshold(1.7, controller="shop")
        with pytest.raises(ConfigError, match=r"controller is 'shops'; the cluster has .*shop"):
            status(controller="shops")


def test_of_two_controllers_with_a_name_the_refusal_of_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """During an update replicas with other settings have a controller of their own."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    stricter = plan_of(ServiceClass(floor=0.8))
    told = pytest.raises(
        RunError, match=r"1 of 2 controllers called 'shop' refused, the others obey: threshold is 0\.6"
    )
    with controller("shop", plan_of()), controller("shop", stricter), told:
        set_threshold(0.6, controller="shop")


def test_a_controller_by_its_name_is_not_that_of_a_further_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")

    async def overrides(name: str) -> list[float | None]:
        [status] = [await found.status() for found in find_controllers(name)]
        return [each.override.threshold if each.override else None for each in status.classes]

    with controller("shop", plan_of()), controller("shop:small", plan_of()):
        set_threshold(0.6, controller="shop")
        assert asyncio.run(overrides("shop")) == [0.6]
        assert asyncio.run(overrides("shop:small")) == [None]


def test_a_controller_by_its_name_needs_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="needs the address of a Ray cluster in RAY_ADDRESS"):
        status(controller="shop")

"""The controller on a real cluster: killed, frozen, overruled, and obeyed by Serve's autoscaler."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mars_ray.load.client import Target
from mars_ray.load.generator import run_load
from mars_ray.load.plan import closed_loop
from mars_ray.load.record import RequestOutcome, RequestRecord
from tests.serve.cluster_samples import CEILING, CLASSES, ENGINE, SOON, STEP_SECONDS, Cluster, cluster, deploy_file
from tests.serve.load_samples import PROMPT_POOL, thresholds, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
CONTROLLER = "ray::ControllerActor"


def target(running: Cluster, ignore_eos: bool = True) -> Target:
    return Target(url=running.url, model="bundled", timeout_s=STEP_SECONDS, extra_body={"ignore_eos": ignore_eos})


async def under_load(running: Cluster, clients: int, last: Callable[[], bool], *, ignore_eos: bool = True) -> None:
    """Keep so many requests in flight until `last` is true."""
    stop = asyncio.Event()
    plan = closed_loop(PROMPT_POOL, seed=6, requests=None, max_tokens=64)
    load = asyncio.create_task(run_load(target(running, ignore_eos), plan.requests, clients=clients, stop=stop))
    try:
        await asyncio.to_thread(until, last)
    finally:
        stop.set()
        await load


def state(running: Cluster) -> dict[str, Any]:
    """What the controller says; nothing while there is none."""
    status, text = running.get("/control")
    found: dict[str, Any] = json.loads(text) if status == 200 else {"replicas": [], "classes": []}
    return found


@pytest.fixture
def overridden(running: Cluster) -> Iterator[float]:
    """All thresholds set to 0.6 by an operator, and followed."""
    with httpx2.Client(base_url=running.url, timeout=STEP_SECONDS) as client:
        client.put("/control/threshold", json={"threshold": 0.6}).raise_for_status()
        until(lambda: thresholds(running) == [0.6, 0.6], lambda: thresholds(running))
        yield 0.6
        client.delete("/control/threshold").raise_for_status()


def test_a_killed_controller_is_not_missed_and_comes_back_with_what_operators_set(
    running: Cluster, overridden: float
) -> None:
    plan = closed_loop(PROMPT_POOL, seed=5, requests=150, max_tokens=48)
    ended = count(1)
    killed: list[int] = []

    def kill_it(_record: RequestRecord) -> None:
        if next(ended) == 30:
            killed.append(running.kill(CONTROLLER))

    records = asyncio.run(run_load(target(running), plan.requests, clients=8, on_record=kill_it))
    assert killed
    assert Counter(each.outcome for each in records) == {RequestOutcome.OK: 150}
    until(lambda: len(state(running)["replicas"]) == 2, lambda: state(running))
    assert killed[0] not in {each.pid for each in running.processes(CONTROLLER)}
    assert [each["override"]["threshold"] for each in state(running)["classes"]] == [overridden]
    assert thresholds(running) == [overridden, overridden]


@pytest.mark.slow
def test_replicas_decide_alone_once_the_lease_of_a_frozen_controller_ended(running: Cluster, overridden: float) -> None:
    [frozen] = running.processes(CONTROLLER)
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        until(lambda: thresholds(running) == [CEILING, CEILING], lambda: thresholds(running))
        assert running.ask()[0] == 200
        assert running.get("/control")[0] == 503
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    until(lambda: thresholds(running) == [overridden, overridden], lambda: thresholds(running))


@pytest.mark.slow
def test_under_lasting_load_engines_come_although_thresholds_fell_and_then_thresholds_return(tmp_path: Path) -> None:
    config = deploy_file(
        tmp_path / "serve.yaml",
        {
            "threshold": CEILING,
            "classes": CLASSES,
            "control": {"policy": "capacity"} | SOON,
            "engine": {"max_num_seqs": 4, "max_waiting_seqs": 64},
        },
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": 2,
            "target_ongoing_requests": 1000,  # requests alone would never ask for a second
            "look_back_period_s": 11,
            "upscale_delay_s": 1,
            "downscale_delay_s": 600,
            "policy": {"policy_function": "mars_ray.serve.ray.autoscaling:by_capacity"},
        },
    )
    with cluster("--config", str(config)) as started:
        started.until_engines(1)
        least = [CEILING]

        def grown() -> bool:
            least.extend(thresholds(started))
            return len(started.processes(ENGINE)) == 2

        asyncio.run(under_load(started, clients=24, last=grown))
        started.until_engines(2)
        assert min(least) < CEILING
        until(lambda: thresholds(started) == [CEILING, CEILING], lambda: state(started))


@pytest.mark.slow
def test_what_ships_lowers_its_threshold_under_overload_and_returns_to_lossless_answers() -> None:
    with cluster() as started:
        started.until_engines(1)
        assert set(thresholds(started)) == {1.0}
        # Answers end by themselves: behind its end an answer is nothing the model learnt, and the live audit says so.
        asyncio.run(under_load(started, 64, last=lambda: min(thresholds(started)) < 1.0, ignore_eos=False))
        for found in state(started)["classes"]:
            assert (found["floor_asked"], found["floor"], found["ceiling"]) == (0.9, 0.9, 1.0)
        until(lambda: set(thresholds(started)) == {1.0}, lambda: state(started))
        assert started.ask()[1]["usage"]["threshold_low"] == 1.0

"""`vllm serve` with the agent, and a controller on a real Ray cluster."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
if find_spec("ray") is None:
    pytest.skip("Ray is missing: run make test-vllm", allow_module_level=True)

from tests.vllm.vllm_server import answer, serving, tokens_per_forward  # noqa: E402, I001

import ray  # noqa: E402

from tests.vllm import chat_controller  # noqa: E402
from tests.vllm.chat_controller import CONTROL, call, controller, status  # noqa: E402

WITHIN_S = 90
until = partial(chat_controller.until, within_s=WITHIN_S)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    controller = {"name": "chat", "address": address, "floor": 0.3, "settings": CONTROL}
    agent = ("--middleware", "mars_ray.vllm.agent.middleware.Agent")
    try:
        with serving({"threshold": 1.0, "controller": controller}, *agent) as url:
            yield url
    finally:
        ray.shutdown()


def in_force() -> float | None:
    """The threshold that the server reports."""
    now = status()
    return now.replicas[0].state.classes[0].threshold if now and now.replicas else None


def test_a_threshold_that_an_operator_sets_changes_what_the_engine_does(url: str) -> None:
    until(lambda: in_force() == 1.0)
    _, verified = tokens_per_forward(url)
    call("set_threshold", 0.3, None, None)
    until(lambda: in_force() == 0.3)
    _, trusted = tokens_per_forward(url)
    call("clear_threshold", None)
    until(lambda: in_force() == 1.0)
    assert trusted > verified


def test_load_lowers_the_threshold_and_it_rises_again(url: str) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answer(url)

    callers = [threading.Thread(target=ask) for _ in range(12)]
    for caller in callers:
        caller.start()
    try:
        until(lambda: (in_force() or 1.0) < 1.0)
        now = status()
        assert now is not None and now.replicas[0].state.running + now.replicas[0].state.waiting > 0
    finally:
        stop.set()
        for caller in callers:
            caller.join()
    until(lambda: in_force() == 1.0)


def test_a_controller_that_is_killed_comes_back_and_the_engine_follows_it(url: str) -> None:
    call("set_threshold", 0.3, None, None)
    until(lambda: in_force() == 0.3)
    killed = controller()
    ray.kill(killed)
    until(lambda: in_force() == 0.3 and controller() != killed)
    assert answer(url)


def test_without_a_cluster_the_engine_serves_at_the_configured_threshold(url: str) -> None:
    until(lambda: in_force() == 0.3)
    _, trusted = tokens_per_forward(url)
    ray.shutdown()
    ends_s = time.monotonic() + WITHIN_S
    while tokens_per_forward(url)[1] >= trusted:
        assert time.monotonic() < ends_s

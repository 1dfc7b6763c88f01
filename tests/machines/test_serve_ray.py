"""`mars-ray serve` on several machines: fronts and engines on all, and what callers see when one is lost."""

import time

import pytest

from tests.machines import callers
from tests.machines.endpoint import SECONDS, Endpoint, deploy, start_endpoint
from tests.machines.machines import Machine

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def endpoint(nodes: list[Machine]) -> Endpoint:
    return start_endpoint(nodes, gateways=3, engines=2)


def test_every_machine_answers_and_the_controller_sees_all_engines(endpoint: Endpoint) -> None:
    asked = endpoint.call(endpoint.nodes[1], [endpoint.url(each) for each in endpoint.nodes], 5)
    lines, _ = asked.communicate(timeout=SECONDS)
    assert {status for _, _, status in callers.parsed(lines.splitlines())} == {"200"}, lines
    assert "2 replicas" in endpoint.status()


def test_a_new_config_is_rolled_out_and_no_request_fails(endpoint: Endpoint) -> None:
    head, asking, _ = endpoint.nodes
    running = endpoint.call(asking, [endpoint.url(each) for each in endpoint.nodes], 75)
    assert running.stdout is not None
    lines = [running.stdout.readline() for _ in range(20)]
    began_s = time.monotonic()
    [application] = endpoint.config["applications"]
    application["args"]["threshold"] = 0.9
    deploy(head, endpoint.config)
    took_s = time.monotonic() - began_s
    rest, _ = running.communicate(timeout=SECONDS)
    answers = callers.parsed([*lines, *rest.splitlines()])
    print(f"update: {took_s:.0f} s, {len(answers)} answers, slowest {max(took_s for _, took_s, _ in answers)} s")
    assert {status for _, _, status in answers} == {"200"}
    assert "0.9" in endpoint.status()


def test_callers_of_other_machines_get_answers_again_within_a_minute(endpoint: Endpoint) -> None:
    head, asking, lost = endpoint.nodes
    running = endpoint.call(asking, [endpoint.url(head), endpoint.url(asking)], 90)
    assert running.stdout is not None
    lines = [running.stdout.readline() for _ in range(20)]
    at_s = time.time()
    lost.power_off()
    rest, _ = running.communicate(timeout=SECONDS)
    answers = callers.parsed([*lines, *rest.splitlines()])
    bad = [(asked_s - at_s, took_s, status) for asked_s, took_s, status in answers if status != "200"]
    slow = [(asked_s - at_s, took_s) for asked_s, took_s, status in answers if status == "200" and took_s > 5]
    print(f"power cut: {len(answers)} answers, refused or failed {bad}, slow {slow}")
    assert max((asked_s + took_s for asked_s, took_s, _ in bad), default=0) < 60
    assert all(took_s < callers.PATIENCE_S for _, took_s, _ in answers)

"""What befalls an endpoint on three machines while callers ask: all are answered or told in bounded time, and it is
whole again by itself, or once Ray runs again on the machine that was lost.

What breaks the most comes last: the tests share one endpoint.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.machines.endpoint import Endpoint, start_endpoint
from tests.machines.faults import CONTROLLER, ENGINE, REPLICA, asking, seen, thresholds, told, until
from tests.machines.machines import Machine

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
ENGINES, CUT_OFF_S = 2, 30
TOLD_S = 40
"""Seconds in which whoever asked is answered or told, whatever happens."""
BEFORE, AFTER = 0.77, 0.73
"""Thresholds that an operator sets before a controller is cut off and after it was replaced: no policy chooses them."""


@pytest.fixture(scope="module")
def endpoint(nodes: list[Machine]) -> Endpoint:
    classes = [{"name": "standard", "floor": 0.5}]
    return start_endpoint(nodes, gateways=3, engines=ENGINES, threshold=0.99, classes=classes)


def whole(endpoint: Endpoint) -> bool:
    return len(seen(endpoint)) == ENGINES


def test_callers_of_an_engine_that_hangs_are_answered_by_the_others_and_its_process_is_replaced(
    endpoint: Endpoint,
) -> None:
    until(lambda: whole(endpoint))
    replicas = seen(endpoint)
    lost = next(each for each in endpoint.nodes[1:] if each.processes(REPLICA))
    before = engines(lost)
    with asking(endpoint, endpoint.nodes, 60) as asked:
        lost.run("pkill", "-STOP", ENGINE)
        replaced_s = until(lambda: bool(engines(lost)) and not engines(lost) & before)
    print(f"\nan engine hangs: {asked}; another process after {replaced_s:.0f} s")
    assert not asked.failed
    until(lambda: seen(endpoint) == replicas)  # the replica stays


def engines(machine: Machine) -> set[str]:
    """Return the processes of engines on a machine."""
    return set(machine.run("pgrep", ENGINE, check=False).stdout.split())


def test_streams_of_a_machine_that_is_cut_off_go_on_at_another_and_requests_end_in_bounded_time(
    endpoint: Endpoint,
) -> None:
    until(lambda: whole(endpoint))
    lost = next(each for each in endpoint.nodes[1:] if each.processes(REPLICA))
    head, other = (each for each in endpoint.nodes if each is not lost)
    before = seen(endpoint)
    with asking(endpoint, [other], 75, "--stream") as streamed, asking(endpoint, [head], 75) as asked:
        lost.cut_off()
        streamed.at_s = asked.at_s
        whole_s = until(lambda: whole(endpoint) and seen(endpoint) != before)
        time.sleep(max(0.0, asked.at_s + CUT_OFF_S - time.time()))
        lost.put_back()
    print(f"\ncut off: streams: {streamed}, longest pause {streamed.longest_pause_s} s")
    print(f"  requests: {asked}\n  two engines after {whole_s:.0f} s")
    assert not streamed.broken
    for each in (streamed, asked):
        assert all(took_s < TOLD_S for _, took_s, _ in each.answers)
        assert all(at_s < CUT_OFF_S for at_s, _, _ in each.failed)
    if lost.address not in alive(head):  # Ray gave it up, after 15 to 65 seconds
        lost.wait_for_end("raylet")
        lost.join(head, num_cpus=2)


def alive(head: Machine) -> list[str]:
    """Return the addresses of the machines that Ray takes for alive."""
    ask = "import ray; ray.init(); print([each['NodeManagerAddress'] for each in ray.nodes() if each['Alive']])"
    return re.findall(r"[\d.]+", head.run("python", "-c", ask).stdout.splitlines()[-1])


def move_controller(endpoint: Endpoint) -> Machine:
    """Let the controller be on another machine than the head, and return that: it is put anywhere when it dies."""
    head, *others = endpoint.nodes
    while True:
        until(lambda: any(each.processes(CONTROLLER) for each in endpoint.nodes))
        if found := [each for each in others if each.processes(CONTROLLER)]:
            return found[0]
        head.run("pkill", "-9", "-f", CONTROLLER, check=False)


@contextmanager
def watched(endpoint: Endpoint, machine: Machine) -> Iterator[list[tuple[float, dict[str, float]]]]:
    """Note the thresholds of all engines that answer, and when they were seen, while the block runs."""
    found: list[tuple[float, dict[str, float]]] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.3):
            if said := thresholds(endpoint, machine):
                found.append((time.time(), said))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def set_threshold(endpoint: Endpoint, machine: Machine, threshold: float) -> None:
    """Override the policy, as soon as a controller takes it."""
    body = json.dumps({"threshold": threshold})
    words = "-X", "PUT", "-H", "content-type: application/json", "-d", body, "-w", "%{http_code}"
    until(lambda: told(endpoint, "/control/threshold", *words, machine=machine).endswith("204"))


def test_an_engine_believes_one_controller_at_a_time_when_the_machine_of_one_is_cut_off(endpoint: Endpoint) -> None:
    lost = move_controller(endpoint)
    others = [each for each in endpoint.nodes if each is not lost]
    until(lambda: whole(endpoint))
    set_threshold(endpoint, others[0], BEFORE)
    until(lambda: set(thresholds(endpoint, others[0]).values()) == {BEFORE})
    with asking(endpoint, others, 120) as asked, watched(endpoint, others[0]) as found:
        lost.cut_off()
        set_threshold(endpoint, others[0], AFTER)  # taken by the one that Ray starts elsewhere
        followed_s = time.time() - asked.at_s
        lost.put_back()
        lost.wait_for_end("raylet")  # it was given up
        lost.join(endpoint.nodes[0], num_cpus=2)
        whole_s = until(lambda: whole(endpoint))
    names = {name for _, said in found for name in said}
    in_turn = {
        name: changes([(at_s - asked.at_s, said[name]) for at_s, said in found if name in said]) for name in names
    }
    print(f"\ncontroller cut off with {lost.name}: {asked}\n  another one follows an operator after {followed_s:.0f} s")
    print(f"  thresholds in turn: {in_turn}")
    print(f"  two engines {whole_s:.0f} s after Ray was started again")
    assert all(took_s < TOLD_S for _, took_s, _ in asked.answers)
    assert all(at_s < CUT_OFF_S for at_s, _, _ in asked.failed)
    assert set(found[-1][1].values()) == {AFTER}
    for turns in in_turn.values():  # what the first controller said never comes again
        said = [threshold for _, threshold in turns]
        assert AFTER not in said or said.index(AFTER) == len(said) - 1


def changes(seen_at: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the values that differ from those before them, each with the second at which it was seen first."""
    befores = [None, *(value for _, value in seen_at)]
    return [(round(at_s, 1), value) for (at_s, value), before in zip(seen_at, befores, strict=False) if value != before]

"""The head of a cluster dies and no Redis outlives it: what callers and a job see, and how all of it comes back."""

import time

import pytest

from tests.machines.conftest import TOKEN
from tests.machines.endpoint import Endpoint, deploy, start_endpoint
from tests.machines.faults import asking, kill_ray, seen, until
from tests.machines.job import Job
from tests.machines.machines import Machine, Network, join_cluster, start_store

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
ROWS, ASKED_S, ENGINES = 20_000, 90, 2


@pytest.fixture(scope="module")
def machines(lan: Network) -> list[Machine]:
    """The head, which has no work on it, and two with an engine each and a place for a worker; one has the store."""
    _, *others = machines = [lan.machine() for _ in range(3)]
    start_store(others[0], machines, bucket="runs")
    for each in machines:
        each.set_up_for_ray(TOKEN)
    join_cluster(machines, head_cpus=0, cpus=2)
    return machines


@pytest.fixture(scope="module")
def endpoint(machines: list[Machine]) -> Endpoint:
    return start_endpoint(machines[1:], gateways=2, engines=ENGINES)


def test_on_a_new_cluster_the_same_commands_go_on(machines: list[Machine], endpoint: Endpoint) -> None:
    head, first, second = machines
    job = Job(second, "s3://runs/lost", rows=ROWS, workers=1)
    job.start()
    with asking(endpoint, [first, second], ASKED_S) as asked:
        kill_ray(head)
        code, job_s = job.end(), time.time() - asked.at_s
        for each in (first, second):
            each.wait_for_end("raylet")
        over_s = time.time() - asked.at_s
    ends = asked.failed[:2], asked.failed[-2:]
    print(f"\nhead lost: {len(asked.answers)} answers, {len(asked.failed)} failed: {ends}")
    print(f"  the job ended after {job_s:.0f} s with {code}: {job.said[-600:]}")
    print(f"  Ray on the others ended after {over_s:.0f} s")
    assert code == 1
    assert "Traceback" not in job.said
    assert all(took_s < 60 for _, took_s, _ in asked.answers)

    began_s = time.monotonic()
    join_cluster(machines, head_cpus=0, cpus=2)
    joined_s = time.monotonic() - began_s
    deploy(first, endpoint.config)
    until(lambda: len(seen(endpoint)) == ENGINES)
    whole_s = time.monotonic() - began_s
    job.start()
    with asking(endpoint, [first, second], 10) as asked:
        assert job.end() == 0
    print(f"  again: Ray up after {joined_s:.0f} s, the endpoint whole after {whole_s:.0f} s; {asked}")
    print(f"  the job: {job.said[-300:]}")
    assert not asked.failed
    assert job.whole()

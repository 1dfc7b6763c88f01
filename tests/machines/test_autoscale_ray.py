"""An endpoint that scales with its load: an engine that has no place yet starts on a machine that joins."""

import time

import pytest

from tests.machines.conftest import TOKEN
from tests.machines.endpoint import Endpoint, start_endpoint
from tests.machines.faults import asking, seen, until
from tests.machines.machines import Network, join_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
ASKED_S = 120
SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 1,
    "look_back_period_s": 11,
    "upscale_delay_s": 1,
}


@pytest.fixture(scope="module")
def endpoint(lan: Network) -> Endpoint:
    """A head without work, and a machine with a place for one engine."""
    machines = [lan.machine() for _ in range(2)]
    for each in machines:
        each.set_up_for_ray(TOKEN)
    join_cluster(machines, head_cpus=0, cpus=1)
    return start_endpoint(machines, gateways=2, engines=SCALING)


def test_under_load_an_engine_starts_on_a_machine_that_joins(endpoint: Endpoint, lan: Network) -> None:
    head, only = endpoint.nodes
    with asking(endpoint, [only, head], ASKED_S) as asked:
        waits_s = until(lambda: "pending tasks/actors" in head.run("ray", "status").stdout)
        assert len(seen(endpoint)) == 1
        began_s = time.monotonic()
        joins = lan.machine()
        joins.set_up_for_ray(TOKEN)
        joins.join(head, num_cpus=1)
        joined_s = time.monotonic() - began_s
        whole_s = until(lambda: len(seen(endpoint)) == 2)
        assert joins.processes("mars_ray.engine.process.fork_server")
    print(
        f"\nscaled: an engine waits for a place after {waits_s:.0f} s; Ray is up on a new machine in {joined_s:.0f} s,"
    )
    print(f"  the controller sees its engine {whole_s:.0f} s later; {asked}")
    assert not asked.failed

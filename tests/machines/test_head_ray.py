"""The head of a cluster is killed and started again with the Redis that outlived it: what callers see meanwhile."""

import shutil
import subprocess
import time

import pytest

from tests.machines.conftest import TOKEN
from tests.machines.endpoint import Endpoint, start_endpoint
from tests.machines.faults import asking, kill_ray
from tests.machines.machines import Network, join_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
AWAY_S, ASKED_S = 15, 120
REDIS_PORT = 6380


@pytest.fixture(scope="module")
def endpoint(lan: Network) -> Endpoint:
    """Machines for Redis, the head, which has no work on it, and two with a front and an engine each."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server not installed")
    redis, head, *others = machines = [lan.machine() for _ in range(4)]
    for each in machines:
        each.set_up_for_ray(TOKEN)
    words = "redis-server", "--bind", redis.address, "--port", str(REDIS_PORT), "--protected-mode", "no"
    redis.start(*words, stdout=subprocess.DEVNULL)
    head.environment["RAY_REDIS_ADDRESS"] = f"{redis.address}:{REDIS_PORT}"
    join_cluster([head, *others], head_cpus=0, cpus=2)
    return start_endpoint(others, gateways=2, engines=2)


def test_callers_are_answered_while_the_head_is_away_and_the_endpoint_is_whole_behind_it(
    endpoint: Endpoint, lan: Network
) -> None:
    head = lan.machines[1]
    with asking(endpoint, endpoint.nodes, ASKED_S) as asked:
        kill_ray(head)
        time.sleep(AWAY_S)
        head.join(head, num_cpus=0)
    print(f"head away {AWAY_S} s: {asked}")
    assert not [each for each in asked.failed if each[0] > ASKED_S / 2]
    assert "2 replicas" in endpoint.status()

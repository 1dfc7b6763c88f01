"""Three machines with a Ray node each."""

from collections.abc import Iterator

import pytest

from tests.machines.machines import Machine, Network, join_cluster, start_store, unavailable

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def lan() -> Iterator[Network]:
    if reason := unavailable():
        pytest.skip(reason)
    with Network() as found:
        yield found


@pytest.fixture(scope="module")
def nodes(lan: Network) -> list[Machine]:
    """A cluster whose head, the driver's node, has one CPU, and the others two; the bucket `runs` is in a store."""
    machines = [lan.machine() for _ in range(3)]
    start_store(machines[0], machines, bucket="runs")
    for each in machines:
        each.set_up_for_ray(TOKEN)
    join_cluster(machines, head_cpus=1, cpus=2)
    return machines

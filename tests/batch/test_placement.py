"""Which node a worker goes to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.batch.run.options import WorkerOptions
from mars_ray.batch.run.placement import NodeResources, place_workers
from mars_ray.errors import ClusterError

clusters = st.lists(st.builds(NodeResources, st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=5).filter(
    lambda nodes: any(node.cpus for node in nodes)
)


def cluster(nodes: list[NodeResources]) -> dict[str, NodeResources]:
    return {f"n{number}": node for number, node in enumerate(nodes)}


@given(
    nodes=clusters,
    count=st.integers(1, 12),
    cpus=st.sampled_from([None, 0.5, 1.0, 2.0]),
    gpus=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_workers_never_take_more_than_a_node_has_and_leave_a_whole_cpu_somewhere(
    nodes: list[NodeResources], count: int, cpus: float | None, gpus: float
) -> None:
    named = cluster(nodes)
    try:
        places = place_workers(named, "n0", WorkerOptions(count=count, cpus=cpus, gpus=gpus))
    except ClusterError:
        return
    assert len(places) == count
    left = {name: node.cpus - sum(place.cpus for place in places if place.node == name) for name, node in named.items()}
    assert min(left.values()) >= -1e-9
    assert max(left.values()) >= 1 - 1e-9
    assert all(gpus * [place.node for place in places].count(name) <= node.gpus for name, node in named.items())


@given(nodes=clusters, count=st.integers(1, 12))
def test_no_more_workers_than_cpus_always_fit(nodes: list[NodeResources], count: int) -> None:
    count = min(count, sum(int(node.cpus) for node in nodes))
    assert len(place_workers(cluster(nodes), "n0", WorkerOptions(count=count))) == count


def test_workers_spread_over_nodes() -> None:
    nodes = cluster([NodeResources(2), NodeResources(2), NodeResources(4)])
    counts = [place.node for place in place_workers(nodes, "n0", WorkerOptions(count=7))]
    assert [counts.count(name) for name in nodes] == [1, 2, 4]


def test_a_single_cpu_is_shared_by_reader_and_worker() -> None:
    [place] = place_workers(cluster([NodeResources(1)]), "n0", WorkerOptions())
    assert (place.node, place.cpus) == ("n0", 0.0)


def test_too_many_are_refused_with_what_there_is() -> None:
    with pytest.raises(ClusterError, match="2 workers with 2 CPU each do not fit"):
        place_workers(cluster([NodeResources(2), NodeResources(3)]), "n0", WorkerOptions(count=2, cpus=2))

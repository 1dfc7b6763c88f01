"""How many workers a job has, which node each goes to, and how many threads it has there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.batch.run.options import WorkerOptions
from mars_ray.batch.run.placement import NodeResources, place_workers
from mars_ray.errors import ClusterError, ConfigError

SMALL, MIDDLE, LARGE = 1, 3, 140
"""Threads that suit models of 3 million, 135 million and 7 billion parameters."""

clusters = st.lists(st.builds(NodeResources, st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=5).filter(
    lambda nodes: any(node.cpus for node in nodes)
)
suitable = st.sampled_from([SMALL, MIDDLE, LARGE])


def cluster(nodes: list[NodeResources]) -> dict[str, NodeResources]:
    return {f"n{number}": node for number, node in enumerate(nodes)}


def engines(nodes: list[float], workers: WorkerOptions, threads: int, rows: int | None = None) -> list[tuple[str, int]]:
    """The node and the threads of each worker."""
    named = cluster([NodeResources(cpus) for cpus in nodes])
    return [(each.node, each.threads) for each in place_workers(named, workers, threads=threads, rows=rows)]


@given(
    nodes=clusters,
    count=st.none() | st.integers(1, 12),
    cpus=st.sampled_from([None, 0.5, 1.0, 2.0]),
    gpus=st.sampled_from([0.0, 0.5, 1.0]),
    threads=suitable,
    rows=st.none() | st.integers(1, 1000),
)
def test_workers_never_take_more_than_a_node_has(
    nodes: list[NodeResources], count: int | None, cpus: float | None, gpus: float, threads: int, rows: int | None
) -> None:
    named, workers = cluster(nodes), WorkerOptions(count=count, cpus=cpus, gpus=gpus)
    try:
        places = place_workers(named, workers, threads=threads, rows=rows)
    except ClusterError:
        return
    assert len(places) == count if count else places
    for name, node in named.items():
        here = [place for place in places if place.node == name]
        assert sum(place.cpus for place in here) <= node.cpus + 1e-9
        assert gpus * len(here) <= node.gpus
        if cpus is None:  # so no CPU is paid for that no thread uses, and no thread runs on a CPU of others
            assert all(place.cpus == place.threads or place.cpus < 1 for place in here)


@given(nodes=clusters, count=st.integers(1, 12), threads=suitable)
def test_no_more_workers_than_cpus_always_fit(nodes: list[NodeResources], count: int, threads: int) -> None:
    count = min(count, sum(int(node.cpus) for node in nodes))
    assert len(place_workers(cluster(nodes), WorkerOptions(count=count), threads=threads)) == count


@given(nodes=st.lists(st.integers(1, 64), min_size=1, max_size=5), threads=suitable)
def test_by_default_a_long_job_leaves_no_node_and_hardly_a_cpu_idle(nodes: list[int], threads: int) -> None:
    places = engines([*map(float, nodes)], WorkerOptions(), threads, rows=100_000)
    for number, cpus in enumerate(nodes):
        here = [used for node, used in places if node == f"n{number}"]
        assert sum(here) > cpus - len(here)  # CPUs are shared in whole ones
        assert min(here) >= min(threads, cpus)


@pytest.mark.parametrize(
    ("cpus", "threads", "rows", "expected"),
    [
        (2, SMALL, 60, [1]),
        (2, SMALL, 600, [1, 1]),
        (2, MIDDLE, 60, [2]),
        (2, LARGE, 600, [2]),
        (16, SMALL, 10_000, [1] * 16),
        (16, MIDDLE, 10_000, [3] * 5),
        (16, MIDDLE, 60, [16]),
        (16, LARGE, 10_000, [16]),
    ],
)
def test_a_job_has_the_engines_and_threads_that_suit_its_model_and_its_rows(
    cpus: float, threads: int, rows: int, expected: list[int]
) -> None:
    assert [used for _, used in engines([cpus], WorkerOptions(), threads, rows)] == expected


def test_workers_whose_number_is_given_share_every_cpu() -> None:
    assert engines([2, 2, 4], WorkerOptions(count=3), LARGE) == [("n0", 2), ("n1", 2), ("n2", 4)]
    assert engines([8], WorkerOptions(count=2), MIDDLE) == [("n0", 4), ("n0", 4)]


def test_all_cpus_of_a_machine_may_be_asked_for() -> None:
    assert engines([2], WorkerOptions(cpus=2), SMALL) == [("n0", 2)]
    assert engines([2], WorkerOptions(count=2, cpus=1), SMALL) == [("n0", 1), ("n0", 1)]


def test_a_node_without_cpus_gets_no_worker() -> None:
    assert engines([0, 2], WorkerOptions(), LARGE, rows=1000) == [("n1", 2)]


def test_by_default_every_gpu_has_a_worker() -> None:
    named = cluster([NodeResources(8, 2), NodeResources(8, 1)])
    places = place_workers(named, WorkerOptions(gpus=1), threads=LARGE)
    assert [(each.node, each.cpus) for each in places] == [("n0", 1.0), ("n0", 1.0), ("n1", 1.0)]


def test_workers_spread_over_nodes() -> None:
    nodes = cluster([NodeResources(2), NodeResources(2), NodeResources(4)])
    counts = [place.node for place in place_workers(nodes, WorkerOptions(count=8), threads=SMALL)]
    assert [counts.count(name) for name in nodes] == [2, 2, 4]


def test_too_many_are_refused_with_what_there_is() -> None:
    nodes = cluster([NodeResources(2), NodeResources(3)])
    with pytest.raises(ClusterError, match="2 workers with 3 CPU each do not fit"):
        place_workers(nodes, WorkerOptions(count=2, cpus=3), threads=SMALL)
    with pytest.raises(ClusterError, match="A worker with 4 CPU does not fit"):
        place_workers(nodes, WorkerOptions(cpus=4), threads=SMALL)


def test_a_model_on_several_gpus_needs_a_worker_with_as_many() -> None:
    with pytest.raises(ConfigError, match="set gpus to 4"):
        WorkerOptions(gpus=1, tensor_parallel_size=4).check()
    four = WorkerOptions(gpus=4, tensor_parallel_size=4)
    four.check()
    places = place_workers(cluster([NodeResources(16, 8), NodeResources(16, 2)]), four, threads=LARGE)
    assert [place.node for place in places] == ["n0", "n0"]

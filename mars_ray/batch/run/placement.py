"""Choose the node of each worker, so that what reads and shapes the rows of a job finds a CPU at any time.

In:    the CPUs and GPUs of each node, and the workers that are asked for.
Out:   a node and a share of its CPUs for each of them.
Never: takes the last CPU of one node, which cuts the rows into blocks: the driver's, or the largest if that has none.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mars_ray.batch.run.options import WorkerOptions
from mars_ray.errors import ClusterError


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What a node has."""

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs."""

    node: str
    cpus: float
    """CPUs it asks for there."""


def place_workers(
    nodes: Mapping[str, NodeResources], driver: str, workers: WorkerOptions, *, part: int = 1
) -> list[Place]:
    """Return a place for each worker; `driver` is the driver's node.

    Where workers do not say how many CPUs they take, those of a node share one `part`th of its whole CPUs, one each at
    most. Raises `ClusterError` where they do not all fit.
    """
    if workers.count * (workers.cpus or 1.0) > sum(each.cpus for each in nodes.values()):
        raise ClusterError(_too_many(nodes, workers))
    cutting = driver if nodes[driver].cpus >= 1 else max(nodes, key=lambda name: nodes[name].cpus)
    free = {name: each.cpus - (name == cutting) for name, each in nodes.items()}
    counts = dict.fromkeys(nodes, 0)
    for _ in range(workers.count):
        fitting = [name for name in nodes if _fits(nodes[name], free[name], counts[name], workers)]
        if not fitting:
            raise ClusterError(_too_many(nodes, workers))
        # The node that has the most left for one more.
        counts[max(fitting, key=lambda name: free[name] / (counts[name] + 1))] += 1
    shares = {name: workers.cpus or _share(free[name] // part, count) for name, count in counts.items() if count}
    return [Place(name, share) for name, share in shares.items() for _ in range(counts[name])]


def _fits(node: NodeResources, free: float, count: int, workers: WorkerOptions) -> bool:
    cpus, gpus = (count + 1) * (workers.cpus or 0.0), (count + 1) * workers.gpus
    return free >= cpus and node.gpus >= gpus


def _share(cpus: float, count: int) -> float:
    # Whole CPUs together: of one that lacks a part nobody else could use the rest. Rounded down as Ray counts.
    return min(1.0, math.floor(100 * max(cpus, 0.0) / count) / 100)


def _too_many(nodes: Mapping[str, NodeResources], workers: WorkerOptions) -> str:
    each = f"{workers.cpus or 1:g} CPU" + (f" and {workers.gpus:g} GPU" if workers.gpus else "")
    there = "; ".join(f"{node.cpus:g} CPU and {node.gpus:g} GPU" for node in nodes.values())
    return (
        f"{workers.count} workers with {each} each do not fit into the cluster, whose nodes have {there}, one CPU "
        "of it for reading. Lower workers or what each asks for, or join a larger cluster with RAY_ADDRESS."
    )

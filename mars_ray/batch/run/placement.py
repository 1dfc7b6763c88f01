"""Choose how many workers a job has, the node of each, and the CPUs it takes there, which are its threads.

In:    the CPUs and GPUs of each node, the workers that are asked for, the threads that suit the model, the rows to do.
Out:   a node and CPUs of it for each worker.
Never: keeps a CPU back: what reads, cuts and hands on rows asks Ray for none, and runs beside the workers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mars_ray.batch.run.options import WorkerOptions
from mars_ray.errors import ClusterError

ROWS_PER_WORKER = 64
"""Rows that are worth a worker: two batches of an engine on a CPU."""


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

    @property
    def threads(self) -> int:
        """Threads of a decoding step."""
        return max(1, int(self.cpus))


def place_workers(
    nodes: Mapping[str, NodeResources], workers: WorkerOptions, *, threads: int, rows: int | None = None, part: int = 1
) -> list[Place]:
    """Return a place for each worker.

    Where they do not say how many they are, each node has as many as its resources leave room for with `threads` each,
    and there are no more than `rows` are worth. Where they do not say how many CPUs they take, those of a node share
    one `part`th of its whole CPUs; a model for which one thread is enough takes no more than one. Raises `ClusterError`
    where they do not all fit.
    """
    free = {name: each.cpus if workers.cpus else each.cpus // part for name, each in nodes.items()}
    room = {name: _room(each, free[name], workers, threads) for name, each in nodes.items()}
    count = workers.count
    if count is None:
        worth = math.inf if rows is None else math.ceil(rows / ROWS_PER_WORKER)
        count = int(max(1, min(sum(room.values()), worth)))
    elif not (workers.cpus or workers.gpus) and count <= sum(each.cpus for each in nodes.values()):
        room = dict.fromkeys(nodes, count)
    counts = dict.fromkeys(nodes, 0)
    for _ in range(count):
        fitting = [name for name in nodes if counts[name] < room[name]]
        if not fitting:
            raise ClusterError(_too_many(nodes, workers, count))
        # The node that has the most left for one more.
        counts[max(fitting, key=lambda name: free[name] / (counts[name] + 1))] += 1
    most = 1.0 if workers.gpus or threads == 1 else math.inf
    shares = {name: workers.cpus or min(most, _share(free[name], count)) for name, count in counts.items() if count}
    return [Place(name, share) for name, share in shares.items() for _ in range(counts[name])]


def _room(node: NodeResources, free: float, workers: WorkerOptions, threads: int) -> int:
    """Return how many workers a node has room for."""
    asked = [free / workers.cpus] if workers.cpus else []
    asked += [node.gpus / workers.gpus] if workers.gpus else []
    if asked:
        return int(min(asked) + 1e-6)
    return max(1, int(free) // threads) if free >= 1 else 0


def _share(cpus: float, count: int) -> float:
    # Whole CPUs are threads; of less than one each takes what Ray can count.
    return float(cpus // count) if cpus >= count else math.floor(100 * cpus / count) / 100


def _too_many(nodes: Mapping[str, NodeResources], workers: WorkerOptions, count: int) -> str:
    each = f"{workers.cpus or 1:g} CPU" + (f" and {workers.gpus:g} GPU" if workers.gpus else "")
    there = "; ".join(f"{node.cpus:g} CPU and {node.gpus:g} GPU" for node in nodes.values())
    asked = f"A worker with {each} does" if count == 1 else f"{count} workers with {each} each do"
    return (
        f"{asked} not fit into the cluster, whose nodes have {there}. Lower workers or what each asks for, or join a "
        "larger cluster with RAY_ADDRESS."
    )

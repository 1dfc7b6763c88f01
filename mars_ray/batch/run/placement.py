"""Divide a job: the number of workers, the node and the CPUs of each worker, and the rows in a block.

In:    the CPUs and GPUs of each node, the worker options, the best number of threads for the model, and the number
       of rows.
Out:   a node and a number of CPUs for each worker; the rows in a block, and the blocks of a worker at a time.
Never: reserves a CPU for other tasks, because the tasks that read and pass on rows request no CPU from Ray.

A decoder returns a block when the last row is done, and a stopped job loses the blocks that have not been returned.
Small jobs therefore have small blocks. Large jobs have larger blocks, because each block costs Ray some time and
memory. Blocks return in any order, because one long row would hold back all later rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mars_ray.batch.run.options import WorkerOptions
from mars_ray.errors import ClusterError

ROWS_PER_WORKER = 64
"""Number of rows per worker that makes another worker worthwhile: two batches of an engine on a CPU."""
SMALL_BLOCKS = 1024
"""Maximum number of blocks in a job whose blocks have fewer than `BLOCK_ROWS` rows."""
BLOCK_ROWS = 64
"""Usual number of rows in a block."""
BLOCKS = 4096
"""Maximum number of blocks in a job, because Ray keeps some kilobytes per block. Larger jobs have larger blocks."""
BLOCKS_PER_WORKER = 4
"""Minimum number of blocks per worker."""
CALLS = 8
"""Minimum number of blocks that a decoder works on at a time."""
ROWS_AT_ONCE = 320
"""Minimum number of rows that a decoder works on at a time. An engine decodes up to 32 rows together on a CPU and 256
on a GPU, so it never runs empty, even if single rows take long."""


@dataclass(frozen=True, slots=True)
class NodeResources:
    """CPUs and GPUs of a node."""

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """The node and the CPUs of a worker."""

    node: str
    cpus: float

    @property
    def threads(self) -> int:
        """Number of threads for the worker's steps."""
        return max(1, int(self.cpus))


def place_workers(
    nodes: Mapping[str, NodeResources], workers: WorkerOptions, *, threads: int, rows: int | None = None, part: int = 1
) -> list[Place]:
    """Return a place for each worker.

    Without `workers.count`, the nodes get all workers that fit with `threads` CPUs each, up to one worker per
    `ROWS_PER_WORKER` rows. Without `workers.cpus`, the workers of a node share 1/`part` of the node's CPUs, and each
    worker gets at most one CPU if `threads` is 1. Raises `ClusterError` if the workers do not fit.
    """
    free = {name: node.cpus if workers.cpus else node.cpus // part for name, node in nodes.items()}
    room = {name: _room(node, free[name], workers, threads) for name, node in nodes.items()}
    count = workers.count
    if count is None:
        useful = math.inf if rows is None else math.ceil(rows / ROWS_PER_WORKER)
        count = int(max(1, min(sum(room.values()), useful)))
    elif not (workers.cpus or workers.gpus) and count <= sum(node.cpus for node in nodes.values()):
        room = dict.fromkeys(nodes, count)
    counts = dict.fromkeys(nodes, 0)
    for _ in range(count):
        fitting = [name for name in nodes if counts[name] < room[name]]
        if not fitting:
            raise ClusterError(_too_many(nodes, workers, count))
        # Add a worker to the node that would then have the most CPUs per worker.
        counts[max(fitting, key=lambda name: free[name] / (counts[name] + 1))] += 1
    max_cpus = 1.0 if workers.gpus or threads == 1 else math.inf
    shares = {name: workers.cpus or min(max_cpus, _share(free[name], count)) for name, count in counts.items() if count}
    return [Place(name, share) for name, share in shares.items() for _ in range(counts[name])]


def rows_per_block(total: int, workers: int) -> int:
    """Return the number of rows in a block for a job of `total` rows."""
    small = min(BLOCK_ROWS, math.ceil(total / SMALL_BLOCKS))
    return max(1, min(max(small, math.ceil(total / BLOCKS)), math.ceil(total / (BLOCKS_PER_WORKER * workers))))


def calls_per_decoder(block_rows: int) -> int:
    """Return the number of blocks that a decoder works on at a time."""
    return max(CALLS, math.ceil(ROWS_AT_ONCE / block_rows))


def _room(node: NodeResources, free: float, workers: WorkerOptions, threads: int) -> int:
    """Return the number of workers that fit on a node."""
    limits = [free / workers.cpus] if workers.cpus else []
    limits += [node.gpus / workers.gpus] if workers.gpus else []
    if limits:
        return int(min(limits) + 1e-6)
    return max(1, int(free) // threads) if free >= 1 else 0


def _share(cpus: float, count: int) -> float:
    # A share of one CPU or more is a whole number, because it is also the number of threads. Ray counts smaller shares
    # in hundredths.
    return float(cpus // count) if cpus >= count else math.floor(100 * cpus / count) / 100


def _too_many(nodes: Mapping[str, NodeResources], workers: WorkerOptions, count: int) -> str:
    size = f"{workers.cpus or 1:g} CPU" + (f" and {workers.gpus:g} GPU" if workers.gpus else "")
    available = "; ".join(f"{node.cpus:g} CPU and {node.gpus:g} GPU" for node in nodes.values())
    subject = f"A worker with {size} does" if count == 1 else f"{count} workers with {size} each do"
    return (
        f"{subject} not fit into the cluster, whose nodes have {available}. Lower workers, cpus or gpus, or join a "
        "larger cluster with RAY_ADDRESS."
    )

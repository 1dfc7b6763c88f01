"""What a live view is told: the status without its replicas, their history, and what each threshold would give now.

In:    the load, the plan.
Out:   frozen records.
Never: decides; the policies do, by the same figures.
"""

from dataclasses import dataclass

from mars_ray.control.backlog import BatchJobState
from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.core.history import Frame
from mars_ray.control.core.status import ClusterStatus
from mars_ray.control.settings import ControlPlan
from mars_ray.engine.stats.profile import GRID


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """What a threshold would give now, if all classes had it."""

    threshold: float
    tokens_s: float
    """Tokens a second of all replicas with all rows in use."""
    demand: float
    """What is asked for, queues included, as a share of what all replicas can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReport:
    """The cluster now, and what was before as far as the reader does not know it."""

    controller: str
    """Which life of the controller this is: another after each restart."""
    status: ClusterStatus
    """Its replicas are left out: the frames have what is shown of them."""
    replicas: int
    curve: tuple[CurvePoint, ...]
    """Falling from the ceiling; empty before any speed was measured."""
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A batch job on the cluster."""

    name: str
    job: BatchJobState
    tokens: int
    """Tokens its workers have made in this run."""
    workers: int
    late_s: float
    paused: bool


def curve_of(load: ClusterLoad, plan: ControlPlan) -> tuple[CurvePoint, ...]:
    """Return what each threshold up to the ceiling would give; nothing before a speed was measured."""
    if load.speed is None or not load.replicas:
        return ()
    thresholds = sorted({plan.ceiling, *(each for each in GRID if each < plan.ceiling)}, reverse=True)
    return tuple(
        CurvePoint(
            threshold=threshold,
            tokens_s=load.replicas * load.speed.max_tokens_s(threshold),
            demand=sum(load.share_with_queue(each.name, threshold) for each in load.classes) / load.replicas,
        )
        for threshold in thresholds
    )

"""The batch job that the replicas of a controller work on, and the load of callers that makes it wait.

In:    the work that is left, and whether workers pause; the status of each online controller.
Out:   the state of the job; whether its workers must stop taking rows.
Never: counts work that its driver no longer reports, because nobody does that work, or mistakes a threshold set by an
       operator for load.
"""

from collections.abc import Sequence
from dataclasses import replace

from mars_ray.control.cluster_load import Backlog, BatchJobState
from mars_ray.control.core.replica_registry import ReplicaRegistry
from mars_ray.control.core.status import ClusterStatus

BACKLOG_S = 15.0
"""Seconds after which a backlog that its driver has not renewed no longer counts. Drivers report once a second."""


class BatchJob:
    """The batch job that the replicas of a controller work on, if there is one."""

    def __init__(self) -> None:
        self._backlog: Backlog | None = None
        self._updated_s = 0.0
        self._paused = False

    def update(self, backlog: Backlog, now_s: float, *, paused: bool) -> None:
        """Store the driver's latest report, which holds for up to `BACKLOG_S`."""
        self._backlog = backlog
        self._updated_s = now_s
        self._paused = paused

    def is_paused(self, now_s: float) -> bool:
        """Return whether workers must not take new rows. A driver that is gone pauses nobody."""
        return self._paused and now_s - self._updated_s <= BACKLOG_S

    def state(self, replicas: ReplicaRegistry, now_s: float) -> BatchJobState | None:
        """Return the current state of the job; None if there is no job, no driver that reports it, or no worker."""
        if self._backlog is None or now_s - self._updated_s > BACKLOG_S or not len(replicas):
            return None
        left_s = self._backlog.seconds
        thresholds = replicas.thresholds()
        return BatchJobState(
            backlog=replace(self._backlog, seconds=None if left_s is None else left_s - (now_s - self._updated_s)),
            threshold=sum(thresholds) / len(thresholds),
            tokens_s=replicas.tokens_s(),
        )


class Yielding:
    """Makes batch work yield once load affects an online class, until none is affected for `recover_s` seconds."""

    def __init__(self, recover_s: float) -> None:
        self._recover_s = recover_s
        self._short_s: float | None = None
        """Time at which load last affected a class."""

    def follow(self, online: Sequence[ClusterStatus], now_s: float) -> bool:
        """Return whether batch work must yield now."""
        short = any(map(_short, online))
        if short:
            self._short_s = now_s
        return short or (self._short_s is not None and now_s - self._short_s < self._recover_s)


def _short(status: ClusterStatus) -> bool:
    """Return whether load affects callers, as shown by lowered thresholds, waiting requests, or missing replicas."""
    return (
        any(item.threshold < item.ceiling and item.override is None for item in status.classes)
        or any(replica.state.waiting for replica in status.replicas)
        or status.desired_replicas > len(status.replicas)
    )

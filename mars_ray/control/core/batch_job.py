"""What the controller of a batch job knows of it: what the driver told last, and when."""

from dataclasses import replace

from mars_ray.control.backlog import Backlog, BatchJobState
from mars_ray.control.core.replica_registry import ReplicaRegistry


class BatchJob:
    """The batch job that the replicas of a controller work on, if they do."""

    def __init__(self) -> None:
        self._backlog: Backlog | None = None
        self._updated_s = 0.0
        self.paused = False
        """Whether workers are to take no new rows."""

    def update(self, backlog: Backlog, now_s: float, *, paused: bool) -> None:
        """Take what the driver says; it holds until the next time."""
        self._backlog, self._updated_s, self.paused = backlog, now_s, paused

    def state(self, replicas: ReplicaRegistry, now_s: float) -> BatchJobState | None:
        """Return how the job stands now; None where there is no job, or no worker."""
        if self._backlog is None or not len(replicas):
            return None
        left_s, thresholds = self._backlog.seconds, replicas.thresholds()
        return BatchJobState(
            backlog=replace(self._backlog, seconds=None if left_s is None else left_s - (now_s - self._updated_s)),
            threshold=sum(thresholds) / len(thresholds),
            tokens_s=replicas.tokens_s(),
        )

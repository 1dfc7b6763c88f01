"""State and decisions of the controller, for operators and for the driver of a batch job."""

from dataclasses import dataclass

from mars_ray.control.core.overrides import Override
from mars_ray.engine.stats.state import EngineState


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica as the controller sees it."""

    replica: str
    age_s: float
    """Seconds since the replica's last report."""
    state: EngineState
    """State of the replica's engine when that report was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatus:
    """One class of service as the controller sees it."""

    name: str
    threshold: float
    floor: float
    floor_asked: float
    """The floor that the operator set; the floor in force may be higher."""
    floor_reason: str
    """Reason why the floor in force is higher than the operator's; empty if it is not."""
    ceiling: float
    reason: str
    """Reason for the threshold."""
    requests_s: float
    changes: int
    """Number of times the threshold has changed since the controller started."""
    override: Override | None
    late_s: float
    """Seconds by which a batch job will miss its deadline even at the floor; 0 if it can end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """State and decisions of the controller."""

    policy: str
    epoch: int
    """Number of decisions made since the controller started."""
    desired_replicas: int
    replicas: tuple[ReplicaStatus, ...]
    classes: tuple[ClassStatus, ...]
    rehearsal: str = ""
    """Machines whose step times the replicas take, and the steps that were slower here; empty without a rehearsal."""

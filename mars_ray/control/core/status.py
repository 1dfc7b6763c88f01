"""State and decisions of the controller, for operators and for the driver of a batch job."""

from dataclasses import dataclass

from mars_ray.control.core.overrides import Override
from mars_ray.engine.stats.state import EngineState


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica as the controller sees it."""

    replica: str
    age_s: float
    """Seconds since its last report."""
    state: EngineState
    """State of its engine at that report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatus:
    """One class of service as the controller sees it."""

    name: str
    threshold: float
    floor: float
    floor_asked: float
    """The floor that the operator set; the floor in force may be higher."""
    floor_reason: str
    """Reason for a higher floor in force; otherwise empty."""
    ceiling: float
    reason: str
    """Reason for the threshold."""
    requests_s: float
    changes: int
    """Number of changes of the threshold since the controller started."""
    override: Override | None
    late_s: float
    """Seconds after its deadline at which a batch job ends even at the floor; 0 if it can end in time."""


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

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
    """The state of its engine when it reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatus:
    """One class of service as the controller sees it."""

    name: str
    threshold: float
    floor: float
    floor_asked: float
    """The floor that the operator set; the one in force may be higher."""
    floor_reason: str
    """Why the floor in force is higher; empty where it is not."""
    ceiling: float
    reason: str
    """Why the threshold is what it is."""
    requests_s: float
    changes: int
    """How often its threshold changed since the controller started."""
    override: Override | None
    late_s: float
    """Seconds after its deadline that a batch job ends even at the floor; 0 while it can be in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """State and decisions of the controller."""

    policy: str
    epoch: int
    """How many decisions were made."""
    desired_replicas: int
    replicas: tuple[ReplicaStatus, ...]
    classes: tuple[ClassStatus, ...]

"""State and decisions of the controller, for operators and for the driver of a batch job."""

from dataclasses import dataclass

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.overrides import Override
from mars_ray.engine.stats.grid import GRID
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
    """Seconds by which a batch job will miss its deadline even at the fastest threshold; 0 if it can end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Speed, demand and price as they would be now if all classes had the same threshold."""

    threshold: float
    tokens_s: float
    """Tokens per second of all replicas together when all rows are in use."""
    demand: float
    """Demand, including queues, as a share of the capacity of all replicas."""
    price_per_million_tokens: float | None
    """Expected price of a million tokens at the present demand; None without a price or without demand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """State and decisions of the controller."""

    policy: str
    epoch: int
    """Number of decisions made since the controller started."""
    desired_replicas: int
    replicas: tuple[ReplicaStatus, ...]
    classes: tuple[ClassStatus, ...]
    notice: str = ""
    """Sentence that goes with all these figures; usually empty."""
    warnings: tuple[str, ...] = ()
    """Sentences about what operators should look into, such as drafts that are no longer right."""
    price_per_hour: float | None = None
    """Price of all replicas together for an hour; None unless every replica has a price."""
    price_per_million_tokens: float | None = None
    """Price of a million tokens at the measured tokens per second; None without a price or without tokens."""
    curve: tuple[CurvePoint, ...] = ()
    """Points by threshold, from the ceiling downwards; empty until a speed has been measured."""


def curve_of(load: ClusterLoad, plan: ControlPlan) -> tuple[CurvePoint, ...]:
    """Return speed, demand and price at each threshold, from the ceiling downwards; empty until a speed has been
    measured."""
    if load.speed is None or not load.replicas:
        return ()
    thresholds = sorted({plan.ceiling, *(value for value in GRID if value < plan.ceiling)}, reverse=True)
    return tuple(
        CurvePoint(
            threshold=threshold,
            tokens_s=load.replicas * load.speed.max_tokens_s(threshold),
            demand=load.share_of_capacity(threshold),
            price_per_million_tokens=load.price_per_million_tokens(load.expected_tokens_s(threshold)),
        )
        for threshold in thresholds
    )

"""What a simulation gave: records of numbers, for each second and for the whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from mars_ray.load.slo import RequestSlo
from mars_ray.simulate.latency import LatencyPercentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSeconds:
    """What a request must keep to count as good, in seconds; None where there is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def of(cls, slo: RequestSlo) -> "SloSeconds":
        """Return the limits of a load test."""
        limits = {"ttft_s": slo.ttft_ms, "tpot_s": slo.tpot_ms, "e2e_s": slo.e2e_ms}
        return cls(**{name: None if limit is None else limit / 1000 for name, limit in limits.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMetrics:
    """One second of the cluster."""

    second: int
    arrived: int
    refused: int
    ended: int
    tokens: float
    running: int
    waiting: int
    replicas: int
    """Replicas that take requests."""
    desired_replicas: int
    threshold: float | None
    """Mean threshold over the tokens written; agreement and accuracy are such means too."""
    agreement: float | None
    accuracy: float | None
    ttft_p95_ms: float | None
    e2e_p95_ms: float | None
    good: float | None
    """Share of what ended or was refused that met the SLO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationMetrics:
    """A simulation as a whole."""

    duration_s: float
    """Seconds from the beginning to the last end."""
    requests: int
    ended: int
    refused: int
    """Requests refused because the queue was full."""
    too_long: int
    """Requests refused because prompt and answer do not fit the model."""
    in_flight: int
    """Requests in flight when the simulation ended."""
    tokens: float
    tokens_per_s: float
    ttft_ms: LatencyPercentiles | None
    tpot_ms: LatencyPercentiles | None
    e2e_ms: LatencyPercentiles | None
    good: float | None
    """Share of all requests that met the SLO."""
    threshold: float | None
    """Mean threshold over the tokens; agreement and accuracy are such means too."""
    agreement: float | None
    accuracy: float | None
    threshold_changes_per_minute: float
    """Changes of the mean class on the mean replica."""
    replica_minutes: float


def columns(seconds: Sequence[SecondMetrics]) -> dict[str, list[float | None]]:
    """Return the series by name."""
    return {name: [getattr(second, name) for second in seconds] for name in SecondMetrics.__dataclass_fields__}

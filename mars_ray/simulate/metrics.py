"""Figures of a simulation: latency histograms, one record per second, and one record for the whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEAST_S = 1e-4
MOST_S = 1e5
"""The bins range from `LEAST_S` to `MOST_S`."""
PER_FACTOR = 50.0
"""Number of bins per factor of e, so that each bin is 2 % wide."""
BINS = int(np.log(MOST_S / LEAST_S) * PER_FACTOR) + 2


class LatencyHistogram:
    """Latencies counted in logarithmic bins, because a simulation has millions of requests."""

    def __init__(self) -> None:
        self.counts = np.zeros(BINS)
        self._sum_s = 0.0

    def add(self, seconds: Array) -> None:
        """Count latencies."""
        bins = (np.log(seconds.clip(LEAST_S, MOST_S) / LEAST_S) * PER_FACTOR).astype(np.int64)
        self.counts += np.bincount(bins, minlength=BINS)
        self._sum_s += float(seconds.sum())

    def merge(self, other: "LatencyHistogram") -> None:
        """Add the counts of another histogram."""
        self.counts += other.counts
        self._sum_s += other._sum_s

    @property
    def mean_s(self) -> float | None:
        """Exact mean; None if nothing was counted."""
        return self._sum_s / float(self.counts.sum()) if self.counts.any() else None

    def quantile_s(self, share: float) -> float | None:
        """Return a quantile, interpolated within its bin; None if nothing was counted."""
        total = self.counts.sum()
        if not total:
            return None
        below = self.counts.cumsum()
        number = int(np.searchsorted(below, share * total))
        inside = (share * total - below[number] + self.counts[number]) / max(self.counts[number], 1)
        return LEAST_S * float(np.exp((number + inside) / PER_FACTOR))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPercentiles:
    """Latencies in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def percentiles(latencies: LatencyHistogram) -> LatencyPercentiles | None:
    """Return the mean and the percentiles; None if nothing was counted."""
    if latencies.mean_s is None:
        return None
    p50, p90, p95, p99 = (1000 * (latencies.quantile_s(share) or 0.0) for share in (0.5, 0.9, 0.95, 0.99))
    return LatencyPercentiles(mean=1000 * latencies.mean_s, p50=p50, p90=p90, p95=p95, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMetrics:
    """Figures of one second of the cluster."""

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
    """Mean over the generated tokens, like `agreement` and `accuracy`."""
    agreement: float | None
    accuracy: float | None
    ttft_p95_ms: float | None
    e2e_p95_ms: float | None
    good: float | None
    """Share of requests within the SLO, among all that ended or were refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationMetrics:
    """Figures of a whole simulation."""

    duration_s: float
    """Seconds from the start to the end of the last request."""
    requests: int
    ended: int
    refused: int
    """Requests refused because the queue was full."""
    too_long: int
    """Requests refused because prompt and answer exceed the model's context."""
    in_flight: int
    """Requests still in flight at the end of the simulation."""
    tokens: float
    tokens_per_s: float
    ttft_ms: LatencyPercentiles | None
    tpot_ms: LatencyPercentiles | None
    e2e_ms: LatencyPercentiles | None
    good: float | None
    """Share of all requests that met the SLO."""
    threshold: float | None
    """Mean over the generated tokens, like `agreement` and `accuracy`."""
    agreement: float | None
    accuracy: float | None
    threshold_changes_per_minute: float
    """Mean over classes and replicas."""
    replica_minutes: float


def columns(seconds: Sequence[SecondMetrics]) -> dict[str, list[float | None]]:
    """Return one series per field, with one value per second."""
    return {name: [getattr(second, name) for second in seconds] for name in SecondMetrics.__dataclass_fields__}

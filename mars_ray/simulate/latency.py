"""Latencies of a simulation, counted in bins of 2 %: there are millions of requests, and none of them is kept."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEAST_S, MOST_S, PER_FACTOR = 1e-4, 1e5, 50.0
"""Range of the bins in seconds, and bins for each factor of e."""
BINS = int(np.log(MOST_S / LEAST_S) * PER_FACTOR) + 2


class LatencyHistogram:
    """Counts of latencies, in bins that grow with them."""

    def __init__(self) -> None:
        self.counts = np.zeros(BINS)
        self._sum_s = 0.0

    def add(self, seconds: Array) -> None:
        """Count values."""
        place = (np.log(seconds.clip(LEAST_S, MOST_S) / LEAST_S) * PER_FACTOR).astype(np.int64)
        self.counts += np.bincount(place, minlength=BINS)
        self._sum_s += float(seconds.sum())

    def merge(self, other: "LatencyHistogram") -> None:
        """Add the counts of another histogram."""
        self.counts += other.counts
        self._sum_s += other._sum_s

    @property
    def mean_s(self) -> float | None:
        """Mean of the values themselves."""
        return self._sum_s / float(self.counts.sum()) if self.counts.any() else None

    def quantile_s(self, share: float) -> float | None:
        """Return the value below which `share` of them are, read within its bin."""
        total = self.counts.sum()
        if not total:
            return None
        below = self.counts.cumsum()
        place = int(np.searchsorted(below, share * total))
        inside = (share * total - below[place] + self.counts[place]) / max(self.counts[place], 1)
        return LEAST_S * float(np.exp((place + inside) / PER_FACTOR))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPercentiles:
    """Latencies in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def percentiles(latencies: LatencyHistogram) -> LatencyPercentiles | None:
    """Return mean and percentiles, None without any latency."""
    if latencies.mean_s is None:
        return None
    p50, p90, p95, p99 = (1000 * (latencies.quantile_s(share) or 0.0) for share in (0.5, 0.9, 0.95, 0.99))
    return LatencyPercentiles(mean=1000 * latencies.mean_s, p50=p50, p90=p90, p95=p95, p99=p99)

"""vLLM's Prometheus metrics at one moment, and latencies of the last seconds from its histograms."""

import math
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from prometheus_client import Metric

WINDOW_S = 10.0


class ServedMetrics:
    """Sums over all labels, such as reasons for the end of a request."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._sums: dict[str, float] = {}
        self._buckets: dict[str, dict[float, float]] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.endswith("_bucket"):
                counts = self._buckets.setdefault(sample.name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
            else:
                self._sums[sample.name] = self._sums.get(sample.name, 0.0) + sample.value

    def total(self, name: str) -> float:
        """Return the value of `vllm:name`; 0 if vLLM has not counted it yet."""
        return self._sums.get(f"vllm:{name}", 0.0)

    def buckets(self, name: str) -> dict[float, float]:
        """Return the number of values up to each upper bound of the histogram `vllm:name`."""
        return self._buckets.get(f"vllm:{name}", {})


class _Counted(NamedTuple):
    seconds: float
    buckets: dict[float, float]


class RecentLatency:
    """95th percentile of a latency over about the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._counted: deque[_Counted] = deque()

    def p95(self, now_s: float, buckets: dict[float, float]) -> float | None:
        """Return the percentile in seconds, linear within a bucket; None if no value is new."""
        counted = self._counted
        counted.append(_Counted(now_s, buckets))
        while len(counted) > 2 and now_s - counted[1].seconds >= WINDOW_S:
            counted.popleft()
        before = counted[0].buckets
        new = [(0.0, 0.0), *((bound, buckets[bound] - before.get(bound, 0.0)) for bound in sorted(buckets))]
        rank = 0.95 * new[-1][1]
        for (low, below), (high, count) in pairwise(new):
            if 0 < rank <= count:
                return low if high == math.inf else low + (high - low) * (rank - below) / (count - below)
        return None

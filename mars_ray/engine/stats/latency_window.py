"""Latencies of the last seconds, for who decides about thresholds."""

from collections import deque

import numpy as np

WINDOW_S = 10.0
MAX_VALUES = 1024


class LatencyWindow:
    """Latencies seen within the last `WINDOW_S` seconds; of more than `MAX_VALUES` the last ones."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, now_s: float, latency_s: float) -> None:
        """Record a latency."""
        self._seen.append((now_s, latency_s))

    def p95(self, now_s: float) -> float | None:
        """Return the 95th percentile, None when nothing was seen."""
        latencies = [latency_s for seen_s, latency_s in self._seen if now_s - seen_s <= WINDOW_S]
        return float(np.percentile(latencies, 95)) if latencies else None

"""Latencies of the last seconds, for who decides about thresholds.

In:    values and when they were seen.
Out:   their 95th percentile.
Never: keeps more than `VALUES`.
"""

from collections import deque

import numpy as np

WINDOW_S = 10.0
VALUES = 1024


class Recent:
    """Values seen within `WINDOW_S`; of more than `VALUES` the last ones."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=VALUES)

    def add(self, now_s: float, value: float) -> None:
        """Record a value."""
        self._seen.append((now_s, value))

    def p95(self, now_s: float) -> float | None:
        """Return the 95th percentile, None when nothing was seen."""
        values = [value for seen_s, value in self._seen if now_s - seen_s <= WINDOW_S]
        return float(np.percentile(values, 95)) if values else None

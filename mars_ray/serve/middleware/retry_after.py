"""How long a refused caller should wait.

In:    how long answered requests took.
Out:   whole seconds for `Retry-After`.
Never: sends all refused callers away for longer than `LONGEST_S`.
"""

import math

SMOOTHING = 0.05
"""Weight of the newest request in the mean: the last twenty or so count."""

LONGEST_S = 60


class RetryAfter:
    """Estimates how long to wait from a running mean of the time a request takes.

    After that long, what fills the endpoint now has been answered.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count a request that was answered."""
        self._mean_s += SMOOTHING * (seconds - self._mean_s)

    def seconds(self) -> int:
        """Return the seconds to wait, at least 1."""
        return max(1, min(LONGEST_S, math.ceil(self._mean_s)))

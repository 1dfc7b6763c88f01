"""A clock that never goes back, made from one that may.

In:    a clock in seconds.
Out:   seconds since it was made, as far as the clock went forward.
Never: trusts a step back: a clock set back by an hour would prolong a lease of five seconds by an hour.
"""

import time
from collections.abc import Callable


class SteadyClock:
    """Call it for the time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last_s, self._passed_s = clock, clock(), 0.0

    def __call__(self) -> float:
        """Return the seconds that passed."""
        now_s = self._clock()
        self._passed_s += max(0.0, now_s - self._last_s)
        self._last_s = now_s
        return self._passed_s

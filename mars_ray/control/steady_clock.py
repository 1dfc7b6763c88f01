"""A clock that never goes back, built on one that may.

In:    a clock in seconds.
Out:   seconds since the steady clock was made, counting only forward steps of the given clock.
Never: follows a step back, because a clock set back by an hour would prolong a lease of five seconds by an hour.
"""

import time
from collections.abc import Callable


class SteadyClock:
    """A clock that never goes back; call it to get the time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._passed_s = 0.0

    def __call__(self) -> float:
        """Return the seconds that have passed since the clock was made."""
        now_s = self._clock()
        self._passed_s += max(0.0, now_s - self._last_s)
        self._last_s = now_s
        return self._passed_s

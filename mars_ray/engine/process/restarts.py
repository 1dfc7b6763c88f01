"""Count the processes of an engine that end, and decide whether another one takes their place."""

from collections import Counter, deque

from mars_ray.engine.stats.state import RestartCount

RESTART_SECONDS = 60.0
"""Seconds within which the restarts of an engine are limited."""


class Restarts:
    """Restarts of one engine, up to `limit` within `RESTART_SECONDS`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ends_s = deque[float]()
        """Times of the last ends of a process."""
        self._counts = Counter[str]()

    def allow(self, reason: str, now_s: float) -> bool:
        """Note the end of a process, and return whether another one may take its place."""
        self._ends_s.append(now_s)
        while now_s - self._ends_s[0] > RESTART_SECONDS:
            self._ends_s.popleft()
        allowed = len(self._ends_s) <= self._limit
        self._counts[reason] += allowed
        return allowed

    def counts(self) -> tuple[RestartCount, ...]:
        """Return the number of restarts by reason."""
        return tuple(RestartCount(reason, count) for reason, count in self._counts.items() if count)

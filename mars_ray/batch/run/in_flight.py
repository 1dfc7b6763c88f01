"""What workers report once a second -> the rows under way, and how fast tokens come before any row is done.

In:    how each worker's engine stood, and how long ago.
Out:   sequences under way, tokens generated, tokens per second over the last seconds.
Never: counts rows that are done; the job does.
"""

from collections import deque
from collections.abc import Callable, Iterable

from mars_ray.control.core.controller import ReplicaStatus

RECENT_S = 10.0
"""Rates are those of so many seconds."""


class InFlight:
    """All workers of a run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        """By engine, those that died included."""
        self._recent: dict[str, deque[tuple[float, int]]] = {}

    def hear(self, replicas: Iterable[ReplicaStatus]) -> None:
        """Take what the controller knows now; engines it knows no more are gone."""
        now_s = self._clock()
        running, recent = dict[str, int](), dict[str, deque[tuple[float, int]]]()
        for each in replicas:
            generated = each.state.tokens_running + sum(of_class.tokens for of_class in each.state.classes)
            # A preempted sequence is counted again once it runs again.
            generated = max(generated, self._tokens.get(each.replica, 0))
            running[each.replica] = each.state.running
            points = recent[each.replica] = deque(self._recent.get(each.replica, ()))
            points.append((now_s - each.age_s, generated))
            while points[-1][0] - points[0][0] > RECENT_S:
                points.popleft()
        # Others read these from another thread: they see what was before, or all of what is now.
        self._tokens = self._tokens | {name: points[-1][1] for name, points in recent.items()}
        self._running, self._recent = running, recent

    @property
    def tokens(self) -> int:
        """Generated in this run, by sequences that ended and by those under way."""
        return sum(self._tokens.values())

    @property
    def workers(self) -> dict[str, int]:
        """Sequences under way, by the engine that has them."""
        return dict(self._running)

    def tokens_per_s(self, engine: str | None = None) -> float | None:
        """Return the rate of one engine, or of all; None before there are two reports of one to compare."""
        rates = [_rate(points) for name, points in self._recent.items() if engine in (None, name)]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None


def _rate(points: deque[tuple[float, int]]) -> float | None:
    (start_s, start), (end_s, end) = points[0], points[-1]
    return (end - start) / (end_s - start_s) if end_s - start_s >= 0.5 else None


def engine_name(worker: str, number: int) -> str:
    """Return the name by which an engine of a worker reports: a worker may have several, one after the other."""
    return f"{worker}:{number}"


def worker_of(engine: str) -> str:
    """Return the worker whose engine it is."""
    return engine.rpartition(":")[0]

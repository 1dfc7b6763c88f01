"""The number of threads of a step on a CPU: all that the engine may have, or fewer while other work is on the cores.

In:    the positions and seconds of each step; how often the system took a core from a thread of this process in it.
Out:   the number of threads for the next step.
Never: tries fewer threads on a quiet machine, or more than the CPUs of the process's quota.

The threads of a step wait for each other many times. If one of them has to share its core, all wait for it, and fewer
threads may be faster. How much faster depends on the other work, so both numbers are tried in turns and compared.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from mars_ray.usable_cpus import usable_cpus

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

WATCH_S = 0.25
"""Seconds of steps over which lost cores are counted."""
LOST_PER_S = 60.0
"""Cores lost per second of steps above which the machine is not quiet."""
QUOTA_S = 5.0
"""Seconds after which the quota is read again, because it may change while the engine runs."""
TURNS = 4
"""Number of turns of each number of threads in a trial."""
TURN_S = 0.02
"""Shortest time of a turn: several time slices of the system's scheduler."""
FASTER = 0.97
"""Part of the time with fewer threads that one thread more must save to be worth its core."""
AGAIN_S = 2.0
MOST_AGAIN_S = 8.0
"""Seconds between two trials. They double while the outcome stays the same."""
TRIAL_PART = 0.05
"""Part of the time that trials may take, for steps that are long."""


def lost_cores() -> int:
    """Return how often the system has taken a core from a thread of this process that had more to do."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0


@dataclass(slots=True)
class _Trial:
    """Turns with one thread more and without it. Times are compared among steps of a similar size."""

    fewer: int
    turn: int = 0
    turn_s: float = 0.0
    total_s: float = 0.0
    times_s: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of steps, by the number of threads and the binary logarithm of the positions."""

    @property
    def threads(self) -> int:
        return self.fewer + self.turn % 2

    def add(self, positions: int, seconds: float) -> None:
        self.times_s[self.threads, positions.bit_length()].append(seconds)
        self.turn_s += seconds
        self.total_s += seconds
        if self.turn_s >= TURN_S:
            self.turn += 1
            self.turn_s = 0.0

    @property
    def best(self) -> int:
        """The faster number of threads; the smaller one if no steps of a similar size ran with both."""
        totals = [0.0, 0.0]
        for size in {size for _, size in self.times_s}:
            both = [self.times_s.get((self.fewer + more, size)) for more in (0, 1)]
            if both[0] and both[1]:
                steps = min(len(both[0]), len(both[1]))
                totals[0] += steps * sum(both[0]) / len(both[0])
                totals[1] += steps * sum(both[1]) / len(both[1])
        return self.fewer + (totals[1] < FASTER * totals[0])


class StepThreads:
    """The number of threads of one engine's steps, of which it may have `most`."""

    def __init__(
        self,
        most: int,
        *,
        cpus: Callable[[], int] = usable_cpus,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._cpus = cpus
        self._clock = clock
        self._room = min(most, cpus())
        self._count = self._room
        self._trial: _Trial | None = None
        self._watched_s = 0.0
        self._lost = 0
        self._read_s = clock()
        self._next_trial_s = clock()
        self._pause_s = AGAIN_S
        self._tries_more = False
        """Direction of the next trial where both are possible."""

    @property
    def count(self) -> int:
        """Number of threads for the next step."""
        return self._trial.threads if self._trial else self._count

    def took(self, positions: int, seconds: float, lost: int) -> None:
        """Record the seconds of a step with `count` threads, and how often it lost a core, see `lost_cores`."""
        now_s = self._clock()
        if now_s - self._read_s >= QUOTA_S:
            self._read_s = now_s
            self._fit_quota()
        if self._trial:
            self._trial.add(positions, seconds)
            if self._trial.turn == 2 * TURNS:
                self._end_trial(self._trial, now_s)
            return
        self._watched_s += seconds
        self._lost += lost
        if self._watched_s >= WATCH_S:
            self._watch(now_s)

    def _fit_quota(self) -> None:
        room = min(self._most, self._cpus())
        if room != self._room:
            self._room = self._count = room
            self._trial = None

    def _watch(self, now_s: float) -> None:
        contested = self._lost > LOST_PER_S * self._watched_s
        self._lost, self._watched_s = 0, 0.0
        fewer, more = contested and self._count > 1, self._count < self._room
        if now_s >= self._next_trial_s and (fewer or more):
            self._tries_more = more and (self._tries_more or not fewer)
            self._trial = _Trial(self._count if self._tries_more else self._count - 1)

    def _end_trial(self, trial: _Trial, now_s: float) -> None:
        if trial.best == self._count:
            self._pause_s = min(2 * self._pause_s, MOST_AGAIN_S)
            self._tries_more = not self._tries_more
        else:
            self._pause_s = AGAIN_S
        self._count = trial.best
        self._trial = None
        self._next_trial_s = now_s + max(self._pause_s, trial.total_s / TRIAL_PART)
        self._lost, self._watched_s = 0, 0.0

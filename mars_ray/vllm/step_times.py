"""Measure step times by the number of positions, from the times at which steps begin."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class StepTimeSum:
    """Steps of similar size, and their time."""

    steps: int = 0
    positions: int = 0
    seconds: float = 0.0


class StepTimes:
    """Sums of step times, grouped by positions rounded up to a power of two.

    With asynchronous scheduling the host runs ahead of the device by a step or two, so the time between two beginnings
    is a step's time only on average. Between two steps without a common request the engine may have been idle, so that
    time is left out.
    """

    def __init__(self) -> None:
        self.sums: dict[int, StepTimeSum] = {}
        """Sums, keyed by the upper limit of positions."""
        self._requests: frozenset[str] = frozenset()
        self._positions = 0
        self._began_s = 0.0

    def begin(self, requests: Collection[str], positions: int, now_s: float) -> None:
        """Note that a step begins at `now_s`."""
        if not self._requests.isdisjoint(requests):
            total = self.sums.setdefault(1 << (self._positions - 1).bit_length(), StepTimeSum())
            total.steps += 1
            total.positions += self._positions
            total.seconds += now_s - self._began_s
        self._requests = frozenset(requests)
        self._positions = positions
        self._began_s = now_s

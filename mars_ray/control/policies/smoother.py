"""Smooth a threshold: fast down, slowly up.

In:    a decision each second.
Out:   the threshold.
Never: follows one decision alone down, or any up before `recover_s` allowed it.
"""

from collections import deque


class Smoother:
    """Smooths one threshold: down to the higher of the last two decisions, up to the least one of `recover_s` seconds.

    So it needs no dead band beside the steps of the grid, and cannot wind up.
    """

    def __init__(self, in_force: float, now_s: float, recover_s: float) -> None:
        self._recover_s = recover_s
        self._last_aim = in_force
        self._allowed: deque[tuple[float, float]] = deque([(now_s, in_force)])
        """What each second allowed, rising: a value that is followed by a lower one can never be the least again."""

    def follow(self, decision: float, now_s: float) -> float:
        """Return the threshold for `decision`."""
        allowed, self._last_aim = max(decision, self._last_aim), decision
        while self._allowed and self._allowed[-1][1] >= allowed:
            self._allowed.pop()
        self._allowed.append((now_s, allowed))
        while now_s - self._allowed[0][0] > self._recover_s:
            self._allowed.popleft()
        return self._allowed[0][1]

"""Amounts admitted in the last minute, by the second of their admission."""

import math
from collections import deque

WINDOW_S = 60
"""Length of the window in seconds. An amount leaves it up to a second later, because slots are whole seconds."""


class MinuteWindow:
    """A sliding window of one minute. Times are seconds of a clock that never goes back.

    In any 60 seconds, no more is admitted than the limit, if each amount is added only while it fits.
    """

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()  # second and amount, oldest first
        self.total = 0
        """Sum of the amounts in the window at the last call of `expire`."""

    def expire(self, now_s: float) -> None:
        """Drop the amounts that have left the window."""
        while self._slots and math.floor(now_s) - self._slots[0][0] > WINDOW_S:
            self.total -= self._slots.popleft()[1]

    def add(self, second: int, amount: int) -> None:
        """Add an amount that was admitted in `second`."""
        self.total += amount
        for position in range(len(self._slots), -1, -1):
            if position == 0 or self._slots[position - 1][0] < second:
                self._slots.insert(position, [second, amount])
                return
            if self._slots[position - 1][0] == second:
                self._slots[position - 1][1] += amount
                return

    def give_back(self, second: int, amount: int) -> None:
        """Take back a part of what was added in `second`. Does nothing once that second has left the window."""
        for slot in self._slots:
            if slot[0] == second:
                slot[1] -= amount
                self.total -= amount

    def wait_s(self, now_s: float, amount: int, limit: int) -> float:
        """Return the seconds until `amount` fits below `limit`, if nothing else is admitted until then."""
        excess = self.total + amount - limit
        for second, held in self._slots:
            if excess <= 0:
                return 0.0
            excess -= held
            leaves_s = second + WINDOW_S + 1 - now_s
            if excess <= 0:
                return max(0.0, leaves_s)
        return 0.0 if excess <= 0 else float(WINDOW_S)

    def reset_s(self, now_s: float) -> float:
        """Return the seconds until the window is empty, if nothing else is admitted until then."""
        held = [second for second, amount in self._slots if amount > 0]
        return max(0.0, held[-1] + WINDOW_S + 1 - now_s) if held else 0.0

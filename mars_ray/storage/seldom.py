"""Limit how often a slow action runs, so that it takes at most one percent of the time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

LEAST_S = 1.0
SHARE = 0.01


class Seldom:
    """Timer for one action. If `due` is true, run the action inside `with seldom.done()`."""

    def __init__(self) -> None:
        self._due_s = 0.0

    @property
    def due(self) -> bool:
        """True if the action may run now."""
        return time.monotonic() >= self._due_s

    @contextmanager
    def done(self) -> Iterator[None]:
        """Measure how long the `with` block takes, and set the time at which the action is due again."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            ended_s = time.monotonic()
            self._due_s = ended_s + max(LEAST_S, (ended_s - began_s) / SHARE)

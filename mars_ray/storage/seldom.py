"""Something slow that is done again and again, so seldom that it takes a hundredth of the time at most."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

LEAST_S = 1.0
SHARE = 0.01


class Seldom:
    """Says when it is due; what is done then is timed within `done`."""

    def __init__(self) -> None:
        self._due_s = 0.0

    @property
    def due(self) -> bool:
        """Whether it may be done now."""
        return time.monotonic() >= self._due_s

    @contextmanager
    def done(self) -> Iterator[None]:
        """Time what is done within the block."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            ended_s = time.monotonic()
            self._due_s = ended_s + max(LEAST_S, (ended_s - began_s) / SHARE)

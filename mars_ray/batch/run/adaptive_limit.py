"""Limit the requests in flight to an endpoint of unknown capacity, with additive increase and multiplicative decrease.

As in TCP, each round of answers raises the limit by one and a refusal halves it. The stage therefore leaves room for
other callers of a busy endpoint, and uses all of an idle endpoint.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

FIRST = 8
"""Initial limit."""


class AdaptiveLimit:
    """Hands out turns, each of which allows one request, at most `maximum` at a time. Not thread-safe."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._limit = float(min(maximum, FIRST))
        self._held = 0
        self._begun = 0
        self._lowered_at = 0
        """Number of the newest turn at the time when the limit was last lowered."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """Number of turns that may be held at the same time."""
        return int(self._limit)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[int]:
        """Wait in line for a turn, and hold it during the `with` block. Yields the number of the turn."""
        if self._held >= self.limit or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._admit()
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the turn was granted in the meantime
                    self._held -= 1
                    self._admit()
                raise
        else:
            self._held += 1
        self._begun += 1
        try:
            yield self._begun
        finally:
            self._held -= 1
            self._admit()

    def answered(self) -> None:
        """Raise the limit after an answer."""
        self._limit = min(self._maximum, self._limit + 1 / self._limit)
        self._admit()

    def refused(self, turn: int) -> None:
        """Halve the limit after a refusal, unless the turn began before the limit was last lowered."""
        if turn > self._lowered_at:
            self._limit = max(1.0, self._limit / 2)
            self._lowered_at = self._begun

    def _admit(self) -> None:
        while self._waiting and self._held < self.limit:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self._held += 1
                turn.set_result(None)

"""How many requests a stage has on their way to an endpoint whose room it does not know, plain Python.

By TCP's rule: one more for each round of answers, half as many after a refusal. So what has no room goes to the
endpoint's other callers, and nothing waits where there is some.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

FIRST = 8
"""Requests that begin before anything is known."""


class AdaptiveLimit:
    """Gives out places, `most` at a time at most; use it within one event loop."""

    def __init__(self, most: int) -> None:
        self._most, self._limit = most, float(min(most, FIRST))
        self._held, self._begun, self._lowered_at = 0, 0, 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """Places that may be held now."""
        return int(self._limit)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[int]:
        """Hold a place within the block, in the order in which they were asked for; the value tells it from others."""
        if self._held >= self.limit or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._admit()
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # its turn had come
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
        """Note that what held a place was answered."""
        self._limit = min(self._most, self._limit + 1 / self._limit)
        self._admit()

    def refused(self, place: int) -> None:
        """Note that it was refused for now; what began before the limit was lowered says nothing new."""
        if place > self._lowered_at:
            self._limit, self._lowered_at = max(1.0, self._limit / 2), self._begun

    def _admit(self) -> None:
        while self._waiting and self._held < self.limit:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self._held += 1
                turn.set_result(None)

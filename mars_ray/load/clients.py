"""The clients of a load: places for requests under way, given in order of arrival."""

import asyncio
from collections.abc import Callable


class Clients:
    """A number of clients, or any number where `count` is None."""

    def __init__(self, count: int | None, now: Callable[[], float]) -> None:
        self._free = None if count is None else asyncio.Semaphore(count)
        self._now = now
        self._busy_until_s = 0.0
        """Until when the last request that had to wait did so."""

    async def take(self, scheduled_s: float | None) -> bool:
        """Wait for a client; tell whether a request that was due at `scheduled_s` found none then."""
        if self._free is None:
            assert scheduled_s is not None, "a closed loop has a number of clients"
            return False
        blocked = self._free.locked()
        # One that came due while another before it waited would have found no client either, though it has one now.
        waited = blocked or (scheduled_s is not None and scheduled_s < self._busy_until_s)
        await self._free.acquire()
        if blocked:
            self._busy_until_s = self._now()
        return waited and scheduled_s is not None

    def give_back(self) -> None:
        """Say that a client is done."""
        if self._free is not None:
            self._free.release()

"""Let callers in one at a time, and let those who wait take turns by key."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A lock for one event loop. Within a key the longest wait comes first; a key that had its turn goes to the end."""

    def __init__(self) -> None:
        self._taken: str | None = None
        """The key whose turn it is."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By key, the key whose turn is next first."""

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait for the turn of `key`, and hold it within the block."""
        if self._taken is not None:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._pass_on()  # it came just as the caller left
                raise
        self._taken = key
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        had, self._taken = self._taken, None
        if had in self._waiting:
            self._waiting[had] = self._waiting.pop(had)
        while self._waiting and self._taken is None:
            key = next(iter(self._waiting))
            first = self._waiting[key].popleft()
            if not self._waiting[key]:
                del self._waiting[key]
            if not first.done():  # else its caller has left
                self._taken = key
                first.set_result(None)

"""Let rows that are suspected of killing an engine run alone.

While a suspect waits, nobody else begins, so suspects do not starve.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Isolation:
    """Gives turns to work, within one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._working = self._suspects = 0

    @asynccontextmanager
    async def turn(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait for a turn, and work."""
        async with self._changed:
            if alone:
                self._suspects += 1
                try:
                    await self._changed.wait_for(lambda: not self._working)
                except BaseException:
                    self._suspects -= 1
                    self._changed.notify_all()
                    raise
            else:
                await self._changed.wait_for(lambda: not self._suspects)
            self._working += 1
        try:
            yield
        finally:
            async with self._changed:
                self._working -= 1
                self._suspects -= alone
                self._changed.notify_all()

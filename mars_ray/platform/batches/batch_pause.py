"""Pause of one batch whose rows a limit of its own refuses.

In:    refusals, with the seconds after which the endpoint invites another try.
Out:   the moments at which single rows may try again.
Never: holds a turn of the endpoint while it waits.
"""

import asyncio
import time

REFUSED_S = 10.0
"""Seconds of a pause after a refusal that names none."""
SPACE_S = 0.05
"""Seconds between two rows after a pause, so that a refusal of the first stops the others."""


class BatchPause:
    """Begins with a refusal and ends with the first answer after its time. Use it on one event loop."""

    def __init__(self) -> None:
        self._ends_s = time.monotonic()
        self._next = asyncio.Lock()
        self._ended = False

    @property
    def left_s(self) -> float:
        """Seconds until rows may try again; negative once they may."""
        return self._ends_s - time.monotonic()

    def refused(self, retry_after_s: float | None) -> None:
        """Pause for the given seconds from now."""
        seconds = REFUSED_S if retry_after_s is None else retry_after_s
        self._ends_s = max(self._ends_s, time.monotonic() + seconds)

    def end(self) -> None:
        """Let all rows go on."""
        self._ended = True
        self._ends_s = time.monotonic()

    async def wait(self) -> None:
        """Wait until the row of the caller may try, in line with the other rows."""
        async with self._next:
            while not self._ended and (left_s := self.left_s) > 0:
                await asyncio.sleep(left_s)
            if not self._ended:
                await asyncio.sleep(SPACE_S)

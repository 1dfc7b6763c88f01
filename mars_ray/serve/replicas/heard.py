"""Which replicas this process hears of. The client of the engines asks them once a second; the router sends nothing to
those that fell silent, and Ray Serve, which makes the two apart from each other, leaves them no other way to meet.

In:    names of replicas that answered.
Out:   whether one answered before, and does not any more.
Never: calls a replica silent that was never asked.
"""

import time
from collections.abc import Callable

SILENT_SECONDS = 3.0
"""A replica that was heard, but not for so long, hangs or is cut off."""
FORGOTTEN_SECONDS = 600.0


class Heard:
    """When replicas answered last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now_s = clock
        self._heard_s: dict[str, float] = {}

    def note(self, replica: str) -> None:
        """Take which replica answered."""
        now_s = self._now_s()
        if replica not in self._heard_s:  # others may be gone for good
            self._heard_s = {name: at_s for name, at_s in self._heard_s.items() if now_s - at_s < FORGOTTEN_SECONDS}
        self._heard_s[replica] = now_s

    def silent(self, replica: str) -> bool:
        """Return whether it answered before, and does not any more."""
        now_s = self._now_s()
        return now_s - self._heard_s.get(replica, now_s) > SILENT_SECONDS


HEARD = Heard()
"""What this process heard."""

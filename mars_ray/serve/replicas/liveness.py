"""Which replicas this process hears of. The client of the engines asks them once a second; the router sends nothing to
those that fell silent, and Ray Serve, which makes the two apart from each other, leaves them no other way to meet.

In:    names of replicas that answered.
Out:   whether one answered before, and does not any more.
Never: calls a replica silent that was never asked.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mars_ray.errors import MarsRayError, ReplicaLostError

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


LOST_ROUNDS = 10
"""A call is lost when no engine that answers had it so many times in a row."""

LOST = "the replica that answered died. Send the request again."

T = TypeVar("T")


class WaitingCall:
    """One call, for as long as somebody waits for its answer."""

    def __init__(self) -> None:
        self.begun = False
        """Whether something of the answer came."""
        self.missed = 0
        """How often engines were asked while this call waited, and none said that it has it."""
        self._limit: asyncio.Timeout | None = None
        self._error: MarsRayError | None = None

    @property
    def waits(self) -> bool:
        """Whether an answer is waited for just now: a reader may take its time, too."""
        return self._limit is not None

    async def wait_for(self, answer: Awaitable[T]) -> T:
        """Return the next answer. Raises the error that the call is ended with."""
        self.missed = 0
        try:
            async with asyncio.timeout(None) as self._limit:
                found = await answer
        except TimeoutError:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._limit = None
        self.begun = True
        return found

    def end(self, error: MarsRayError) -> None:
        """Let who waits go on with an error."""
        if self._limit is not None and self._error is None:
            self._error = error
            self._limit.reschedule(asyncio.get_running_loop().time())


class WaitingCalls:
    """The calls of a process. Use it within one running event loop."""

    def __init__(self) -> None:
        self._calls: dict[str, WaitingCall] = {}

    @contextmanager
    def call(self, name: str) -> Iterator[WaitingCall]:
        """Look after a call within the block."""
        call = self._calls[name] = WaitingCall()
        try:
            yield call
        finally:
            if self._calls.get(name) is call:
                del self._calls[name]

    def unheard(self, *, up: bool) -> list[str]:
        """Return the calls to ask the engines for: those that waited when they were asked the last time, too.

        `up` says whether any engine answers; calls that are lost end. While none answers, a call that has not begun may
        not have been sent yet: it waits for an engine to come up.
        """
        for call in self._calls.values():
            if call.missed >= LOST_ROUNDS and (up or call.begun):
                call.end(ReplicaLostError(LOST))
            call.missed += call.waits
        return [name for name, call in self._calls.items() if call.missed > 1]

    def hear(self, running: Iterable[str]) -> None:
        """Take which of the calls an engine has."""
        for name in running:
            if name in self._calls:
                self._calls[name].missed = 0

    def end(self, error: MarsRayError) -> None:
        """End all calls that wait for their first answer."""
        for call in self._calls.values():
            if not call.begun:
                call.end(error)

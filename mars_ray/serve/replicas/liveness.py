"""Track which replicas answer, and end calls whose replica has stopped answering.

In:    once a second, the names of the replicas that answered; the waiting calls, and which of them an engine is
       processing.
Out:   silent replicas, which the router avoids; an error for each call whose engine is lost, that has waited too long
       for an engine to come up, or that no engine will take because they stop.
Never: treats a replica as silent before its first answer, or ends a call that an engine is processing, however long the
       call takes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mars_ray.errors import MarsRayError, ReplicaLostError, UnavailableError

SILENT_SECONDS = 3.0
"""Seconds without an answer after which a replica counts as hung or cut off."""
FORGOTTEN_SECONDS = 600.0


class Heard:
    """Time of each replica's last answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now_s = clock
        self._heard_s: dict[str, float] = {}

    def note(self, replica: str) -> None:
        """Record an answer of a replica."""
        now_s = self._now_s()
        if replica not in self._heard_s:  # drop replicas that may be gone for good
            self._heard_s = {name: at_s for name, at_s in self._heard_s.items() if now_s - at_s < FORGOTTEN_SECONDS}
        self._heard_s[replica] = now_s

    def silent(self, replica: str) -> bool:
        """Return whether a replica that used to answer has stopped answering."""
        now_s = self._now_s()
        return now_s - self._heard_s.get(replica, now_s) > SILENT_SECONDS


HEARD = Heard()
"""Answers seen by this process. The engine client records them, and the router, which Ray Serve creates, reads them."""


LOST_ROUNDS = 10
"""A call counts as lost after this number of consecutive rounds in which no answering engine had it."""

LOST = "the replica that processed the request died. Send the request again."

NONE_UP = "no engine is up. Try again later."
STOPPING = "the engines are stopping. Try again later."

T = TypeVar("T")


class WaitingCall:
    """One call to an engine, with a caller that waits for the answer."""

    def __init__(self, is_sent: Callable[[], bool]) -> None:
        self.is_sent = is_sent
        """Returns whether a replica has the call."""
        self.begun = False
        """Whether a part of the answer has arrived."""
        self.missed = 0
        """Number of consecutive rounds in which this call waited and no engine had it."""
        self.outage = 0
        """Number of rounds in which this call waited for its first answer while no engine was up."""
        self._limit: asyncio.Timeout | None = None
        self._error: MarsRayError | None = None

    @property
    def waits(self) -> bool:
        """Whether the call waits for the engine rather than for the reader of its answer."""
        return self._limit is not None

    async def wait_for(self, answer: Awaitable[T]) -> T:
        """Return the next answer. If `end` is called first, raises the error given there."""
        self.missed = 0
        try:
            async with asyncio.timeout(None) as self._limit:
                result = await answer
        except TimeoutError:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._limit = None
        self.begun = True
        return result

    def end(self, error: MarsRayError) -> None:
        """Raise an error in the waiting caller."""
        if self._limit is not None and self._error is None:
            self._error = error
            self._limit.reschedule(asyncio.get_running_loop().time())


class WaitingCalls:
    """The calls of a process. Use it within one running event loop. A call waits up to `up_rounds` rounds for an engine
    to come up."""

    def __init__(self, up_rounds: float) -> None:
        self._up_rounds = up_rounds
        self._calls: dict[str, WaitingCall] = {}

    @contextmanager
    def call(self, name: str, is_sent: Callable[[], bool]) -> Iterator[WaitingCall]:
        """Track a call within the block. `is_sent` returns whether a replica has it."""
        call = self._calls[name] = WaitingCall(is_sent)
        try:
            yield call
        finally:
            if self._calls.get(name) is call:
                del self._calls[name]

    def unheard(self, *, up: bool) -> list[str]:
        """End lost calls, and return the calls to ask the engines about: those that also waited in the previous round.

        `up` says whether any engine answers. While none does, a call that has not begun may not have been sent yet, so
        it waits for an engine to come up.
        """
        for call in self._calls.values():
            if up or call.begun:
                if call.missed >= LOST_ROUNDS:
                    call.end(ReplicaLostError(LOST))
                call.missed += call.waits
            else:
                if call.outage >= self._up_rounds:
                    call.end(UnavailableError(NONE_UP))
                call.outage += call.waits
        return [name for name, call in self._calls.items() if call.missed > 1]

    @property
    def unsent(self) -> list[WaitingCall]:
        """Calls that wait for a replica to take them."""
        return [call for call in self._calls.values() if call.waits and not call.is_sent()]

    def hear(self, running: Iterable[str]) -> None:
        """Record the calls that an engine is processing."""
        for name in running:
            if name in self._calls:
                self._calls[name].missed = 0

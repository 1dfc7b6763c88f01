"""End calls whose engine is not heard of any more: it hangs, or its machine is cut off.

In:    calls that wait for engines, which are asked once a second; which of them an engine says that it has.
Out:   the same calls; an error where the engine of one is lost, or none is up.
Never: ends a call that an engine says it has, however long it takes.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mars_ray.errors import MarsRayError, ReplicaLostError

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

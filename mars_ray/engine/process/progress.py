"""Decide whether an engine process makes progress, so that one that does not can be replaced.

In:    the state of the engine, requested once a second.
Out:   the reason why the engine counts as stalled.
Never: counts time in which this process was stopped too, such as that of a suspended machine, or time that the engine's
       own step times explain.
"""

import asyncio
from collections.abc import Awaitable, Callable

from mars_ray.engine.stats.state import EngineState

CHECK_SECONDS = 1.0
"""Seconds between two checks. A stop of this process counts as at most one of them, because time is counted by waits of
this length."""


class Progress:
    """Progress of one engine process.

    An engine with sequences stalls if it reads no prompt, generates no token and ends no sequence for `stall_seconds`
    more than its longest step takes, or for `step_seconds` before its first step has ended. So does an engine that
    sends no state for that long.
    """

    def __init__(self, *, stall_seconds: float, step_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._step_seconds = step_seconds
        self._seconds = 0.0
        """Seconds waited since the engine was last seen to make progress."""
        self.state: EngineState | None = None
        """Latest state; None before the first one."""
        self.checks = 0
        """Number of checks so far."""
        self.unchanged = 0
        """Number of checks, counted back from the last one, whose state shows no progress."""

    async def until_stalled(self, ask: Callable[[], Awaitable[EngineState]]) -> str:
        """Return the reason once the engine has stalled. Raises the errors of `ask`, which requests its state."""
        while True:
            state = asyncio.ensure_future(ask())
            self.checks += 1
            try:
                while not (await asyncio.wait((state,), timeout=CHECK_SECONDS))[0]:
                    if self.wait(CHECK_SECONDS):
                        return f"a step has not ended for {self._explained()}"
                self.observe(state.result())
            finally:
                state.cancel()  # also when the engine is closed while this waits
            await asyncio.sleep(CHECK_SECONDS)
            if self.wait(CHECK_SECONDS):
                sequences = self.state.running + self.state.waiting if self.state else 0
                return f"{sequences} sequences got no token and read no prompt for {self._explained()}"

    def observe(self, state: EngineState) -> None:
        """Take the state that answers a check."""
        idle = not (state.running or state.waiting)
        if idle or self.state is None or state.progress != self.state.progress:
            self._seconds = 0.0
            self.unchanged = 0
        else:
            self.unchanged += 1
        self.state = state

    def wait(self, seconds: float) -> bool:
        """Count seconds that this process has waited, and return whether the engine has stalled."""
        self._seconds += seconds
        return self._seconds > self._limit_s

    @property
    def _limit_s(self) -> float:
        if self.state is None or self.state.longest_step_s is None:
            return self._step_seconds
        return self._stall_seconds + self.state.longest_step_s

    def _explained(self) -> str:
        return f"{self._seconds:.0f} s, more than the {self._limit_s:.1f} s that its steps explain"

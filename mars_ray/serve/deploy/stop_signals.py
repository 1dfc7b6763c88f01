"""Ctrl-C, and SIGTERM that `program` makes the same, as something to wait for.

In:    signals.
Out:   whether one came; a second one raises.
Never: cuts off what runs at the first.
"""

import signal
import threading
from types import FrameType, TracebackType

from mars_ray.errors import InterruptedRunError


class StopSignals:
    """Handles the signals within the block; main thread only."""

    def __init__(self) -> None:
        self._came = threading.Event()

    def __enter__(self) -> "StopSignals":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a signal; return whether one came. Raises `InterruptedRunError` at the second."""
        return self._came.wait(seconds)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._came.is_set():
            raise InterruptedRunError("stopped at once; requests that ran were cut off.")
        self._came.set()

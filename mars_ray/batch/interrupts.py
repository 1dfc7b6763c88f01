"""A Ctrl-C that is not lost.

In:    SIGINT.
Out:   `KeyboardInterrupt`, at once as usual and again at the next look.
Never: trusts that the exception arrives: raised in a callback of native code, of which Ray has many, it is dropped.
"""

import signal
import threading
from types import FrameType, TracebackType


class Interrupts:
    """Remembers Ctrl-C within the block. In other threads than the main one, which get none, it does nothing."""

    def __init__(self) -> None:
        self._came = False
        self._before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> "Interrupts":
        if callable(self._before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if it came."""
        if self._came:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if callable(self._before):
            self._before(number, frame)

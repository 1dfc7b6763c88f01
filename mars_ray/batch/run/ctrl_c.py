"""Ctrl-C while a job runs is never lost and never interrupts a write.

Python raises `KeyboardInterrupt` between any two instructions of the main thread. In a destructor or a callback of C
code, it is printed and has no other effect. Between two instructions of a write, it leaves an open transaction.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self


class CtrlC:
    """Handles SIGINT within a `with` block. In other threads than the main thread, it has no effect."""

    def __enter__(self) -> Self:
        self._pressed = False
        self._deferring = False
        self._before = signal.getsignal(signal.SIGINT)
        self._handles = callable(self._before) and threading.current_thread() is threading.main_thread()
        if self._handles:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Finish the inner `with` block, then raise `KeyboardInterrupt` if Ctrl-C has been pressed, now or earlier."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._pressed:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        if not self._deferring:
            assert callable(self._before)
            self._before(number, frame)

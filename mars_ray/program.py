"""Run a command or pipeline, print its last message in one line, and end with an exit code.

The codes are 0 for success, the `exit_code` of a `MarsRayError`, 130 for Ctrl-C and 143 for SIGTERM. SIGTERM raises
`KeyboardInterrupt`, so code that handles Ctrl-C also handles SIGTERM.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

from mars_ray.errors import InterruptedRunError, MarsRayError

SAME_S = 1.0
"""Seconds within which a second SIGTERM is ignored, because `timeout` and batch schedulers send the signal both to a
process and to its group."""
LEAVE_S = 10.0
"""Maximum seconds to wait for Ray to shut down after a stop. Ray's processes end with this process in any case."""
BY_SIGNAL = 128
"""Number to add to a signal number for the exit code, as shells do."""


class Terminations:
    """Passes SIGTERM on to the current handler of Ctrl-C."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s: float | None = None

    @property
    def came(self) -> bool:
        """True once a SIGTERM has arrived."""
        return self._last_s is not None

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a SIGTERM like Ctrl-C. Raises `KeyboardInterrupt` unless Ctrl-C has a different handler."""
        now_s = self._clock()
        if self._last_s is not None and now_s - self._last_s < SAME_S:
            return
        self._last_s = now_s
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs this way
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)


class CtrlC:
    """Handles SIGINT within a `with` block, so that Ctrl-C is never lost and never interrupts a write.

    Python raises `KeyboardInterrupt` between any two instructions of the main thread. In a destructor or a callback of
    C code, it is printed and has no other effect. Between two instructions of a write, it leaves an open transaction.
    In other threads than the main thread, this class has no effect.
    """

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


def run_program(name: str, main: Callable[[], None], *, stopped: str = "Stopped.") -> None:
    """Run `main` in the main thread, then end the process. `stopped` is printed after a stop without a message."""
    terminations = Terminations()
    signal.signal(signal.SIGTERM, terminations.handle)
    line = ""
    code = 0
    try:
        main()
    except MarsRayError as error:
        line = str(error)
        code = error.exit_code
    except KeyboardInterrupt:
        line = stopped
        code = InterruptedRunError.exit_code
    except SystemExit as ended:
        if ended.code != InterruptedRunError.exit_code:
            raise
        line = stopped  # typer exits this way after Ctrl-C
        code = InterruptedRunError.exit_code
    finally:
        # While Ray shuts down, another signal ends the process at once and without a stack trace.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if line:
        with suppress(BrokenPipeError):
            print(f"{name}: {line}", file=sys.stderr)
    if code == InterruptedRunError.exit_code:
        code = BY_SIGNAL + signal.SIGTERM if terminations.came else code
        sys.stdout.flush()
        # If Ray was stopped as well, its exit handler would wait for a minute.
        timer = threading.Timer(LEAVE_S, os._exit, [code])
        timer.daemon = True
        timer.start()
    sys.exit(code)

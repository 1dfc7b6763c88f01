"""How every command and every pipeline ends: in one line, with an exit code that says why.

The codes are 0, that of an error a user can mend, 130 for Ctrl-C and 143 for SIGTERM. SIGTERM is made the same as
Ctrl-C: whatever handles Ctrl-C where the program is handles both.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from mars_ray.errors import InterruptedRunError, MarsRayError

SAME_S = 1.0
"""A second SIGTERM so soon is the same one: `timeout` and batch schedulers send it to a process and to its group."""
LEAVE_S = 10.0
"""What is left to do once a stop was said: to end the processes of Ray. They end with this one in any case."""
BY_SIGNAL = 128
"""A shell says that a signal ended a process by this and the number of the signal."""


class Terminations:
    """Hands SIGTERM on to whatever handles Ctrl-C at that moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s: float | None = None

    @property
    def came(self) -> bool:
        """Whether there was one."""
        return self._last_s is not None

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """Take a SIGTERM; raises `KeyboardInterrupt` unless Ctrl-C means something else now."""
        now_s = self._clock()
        if self._last_s is not None and now_s - self._last_s < SAME_S:
            return
        self._last_s = now_s
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)


def run_program(name: str, main: Callable[[], None], *, stopped: str = "Stopped.") -> None:
    """Run `main` in the main thread, and end the process. `stopped` is said where nothing better is known."""
    terminations = Terminations()
    signal.signal(signal.SIGTERM, terminations.handle)
    line, code = "", 0
    try:
        main()
    except MarsRayError as error:
        line, code = str(error), error.exit_code
    except KeyboardInterrupt:
        line, code = stopped, InterruptedRunError.exit_code
    except SystemExit as ended:
        if ended.code != InterruptedRunError.exit_code:
            raise
        line, code = stopped, ended.code  # what typer makes of Ctrl-C
    finally:
        # Ray goes down from here on; who does not want to wait for it ends the process at once, and without a stack.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if line:
        print(f"{name}: {line}", file=sys.stderr)
    if code == InterruptedRunError.exit_code:
        code = BY_SIGNAL + signal.SIGTERM if terminations.came else code
        sys.stdout.flush()
        # A Ray that was stopped as well is waited for by its own exit for a minute.
        timer = threading.Timer(LEAVE_S, os._exit, [code])
        timer.daemon = True
        timer.start()
    sys.exit(code)

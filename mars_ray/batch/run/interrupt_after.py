"""Interrupt Python code that may never end, such as the chat template of a model."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class _TooLong(BaseException):
    """Error that the timer raises in the thread of the function. `except Exception` does not catch this error."""


class InterruptAfter:
    """Runs one function at a time, and interrupts a function that takes longer than `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result. Raises `TimeoutError` if it takes too long. Native code is not
        interrupted."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._limited, work)

    def _limited(self, work: Callable[[], T]) -> T:
        thread = threading.get_ident()
        changing = threading.Lock()
        ended = False

        def interrupt() -> None:
            with changing:
                if not ended:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooLong))

        timer = threading.Timer(self._seconds, interrupt)
        timer.daemon = True
        timer.start()
        try:
            try:
                return work()
            finally:
                with changing:
                    ended = True
                timer.cancel()
        except _TooLong:
            raise TimeoutError from None

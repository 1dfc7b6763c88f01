"""How long event loops of this process are held up by a single callback.

What is counted is the time of the processor that the thread used, so a busy machine makes nothing longer.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONGEST_S = 0.1
"""While a front does anything for longer, all its callers wait."""


@contextmanager
def watched(report: Callable[[float, str], None], thread: int | None = None) -> Iterator[None]:
    """Tell `report` of every callback above `LONGEST_S` within the block: of one thread or all, on asyncio's loops."""
    run = asyncio.Handle._run

    def timed(self: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(self)
        seconds = time.thread_time() - began_s
        if seconds > LONGEST_S and thread in (None, threading.get_ident()):
            report(seconds, repr(self))

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]

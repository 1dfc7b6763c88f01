"""How long event loops of this process are held up by a single callback.

What is counted is the time of the processor that the thread used, so a busy machine makes nothing longer, less what it
spent on looking for garbage: in the process of the tests that is theirs, and a gateway freezes what it starts with.
"""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONGEST_S = 0.1
"""While a gateway does anything for longer, all its callers wait."""


def longest_s() -> float:
    """Return `LONGEST_S`, or four times what this machine takes now to read a megabyte of JSON if that is longer."""
    text = f"[{', '.join(['[[1]]'] * 150_000)}]"
    seconds = []
    for _ in range(3):
        began_s = time.thread_time()
        json.loads(text)
        seconds.append(time.thread_time() - began_s)
    return max(LONGEST_S, 4 * min(seconds))


@contextmanager
def watched(
    report: Callable[[float, str], None], thread: int | None = None, longest: float = LONGEST_S
) -> Iterator[None]:
    """Tell `report` of every callback above `longest` within the block: of one thread or all, on asyncio's loops."""
    run = asyncio.Handle._run
    garbage = threading.local()

    def collecting(phase: str, _info: dict[str, int]) -> None:
        now_s = time.thread_time()
        if phase == "start":
            garbage.began_s = now_s
        else:
            garbage.seconds = getattr(garbage, "seconds", 0.0) + now_s - getattr(garbage, "began_s", now_s)

    def timed(self: asyncio.Handle) -> None:
        garbage.seconds, began_s = 0.0, time.thread_time()
        run(self)
        seconds = time.thread_time() - began_s - garbage.seconds
        if seconds > longest and thread in (None, threading.get_ident()):
            report(seconds, repr(self))

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    gc.callbacks.append(collecting)
    try:
        yield
    finally:
        gc.callbacks.remove(collecting)
        asyncio.Handle._run = run  # type: ignore[method-assign]

"""A limit to how long is waited for what may never answer."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, ask: Callable[[], T], late: Exception) -> T:
    """Return what `ask` returns. Raises what it raises, and `late` after `seconds`; its thread goes on alone."""
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((ask(), None))
        except BaseException as error:
            outcome.append((None, error))

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    if not outcome:
        raise late
    found, error = outcome[0]
    if error is not None:
        raise error
    return found  # type: ignore[return-value]  # set where there is no error

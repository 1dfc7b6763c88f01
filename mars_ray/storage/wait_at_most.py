"""Wait a limited time for a call that may never return."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_at_most(seconds: float, call: Callable[[], T], timeout: Exception) -> T:
    """Return the result of `call`, or raise its error. Raises `timeout` after `seconds`, while `call` continues."""
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise timeout
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # without an error, `call` has returned

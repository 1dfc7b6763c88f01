"""How many requests are in flight: per key and in this process.

In:    the name of a key, when a request begins and when it is over.
Out:   a place, or an `ApiError` 429 that says when to come back.
Never: waits, or forgets to give a place back, however a request ends.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mars_ray.serve.api_error import ApiError
from mars_ray.serve.limits import RequestLimits


class Admission:
    """Counts of one process; used on its event loop only."""

    def __init__(self, limits: RequestLimits, retry_after_s: Callable[[], int]) -> None:
        self._limits, self.retry_after_s = limits, retry_after_s
        self._in_flight: Counter[str] = Counter()

    @property
    def in_flight(self) -> dict[str, int]:
        """The requests in flight by key; keys without any are left out, so it does not grow with keys come and gone."""
        return dict(self._in_flight)

    @contextmanager
    def place(self, key: str) -> Iterator[None]:
        """Hold a place for `key` within the block. Raises an `ApiError` when there is none."""
        if self._in_flight[key] >= self._limits.requests_per_key:
            message = f"This key has {self._limits.requests_per_key} requests in flight, as many as it may have."
            raise self._refusal(message, "rate_limit_exceeded")
        if self._in_flight.total() >= self._limits.requests:
            raise self._refusal("The endpoint has as many requests in flight as it takes.", "overloaded")
        self._in_flight[key] += 1
        try:
            yield
        finally:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]

    def _refusal(self, message: str, code: str) -> ApiError:
        seconds = str(max(1, int(self.retry_after_s())))
        return ApiError(
            429,
            f"{message} Try again in {seconds} s.",
            type="rate_limit_error",
            code=code,
            headers={"retry-after": seconds},
        )

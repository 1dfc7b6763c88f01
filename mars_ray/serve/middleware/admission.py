"""Limit the requests in flight: per key, in this process, and separately for operators and for pages.

In:    who asks, and the role that the path needs or that it is a page, when a request begins and when it is over.
Out:   a place, or an `ApiError` 429 that says when to come back.
Never: waits, or forgets to give a place back, however a request ends.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.serve.middleware.api_keys import Role

OPERATOR_REQUESTS = 16
"""Requests in flight on the paths of operators, on top of those of callers: operators must be able to act under
overload."""


PAGE_REQUESTS = 64
"""Requests in flight for pages and their files, which need no key."""


class Admission:
    """Counts requests in flight in one process. Use it on one event loop."""

    def __init__(self, limits: RequestLimits, retry_after_s: Callable[[], int]) -> None:
        self._limits, self.retry_after_s = limits, retry_after_s
        self._callers: Counter[str] = Counter()
        self._operators: Counter[str] = Counter()
        self._pages = 0
        self._tokenizing: Counter[str] = Counter()

    @property
    def in_flight(self) -> dict[str, int]:
        """The requests in flight by key; keys without any are left out, so it does not grow with keys come and gone."""
        # Copied before they are added: whoever looks from another thread must not see them change meanwhile.
        return dict(Counter(dict(self._callers)) + Counter(dict(self._operators)))

    @contextmanager
    def admit(self, caller: str, role: Role, *, has_key: bool) -> Iterator[None]:
        """Hold a place within the block for a request on a path of `role`. Raises an `ApiError` when there is none."""
        if role == "operate":
            room = self._operators
            if room.total() >= OPERATOR_REQUESTS:
                raise self._refusal(f"{OPERATOR_REQUESTS} requests of operators are in flight already.", "overloaded")
        else:
            room = self._callers
            self._check_callers(caller, has_key)
        with _counted(room, caller):
            yield

    @contextmanager
    def admit_tokenizing(self, caller: str, *, has_key: bool) -> Iterator[None]:
        """Hold a tokenizer place within the block, on top of the place of `admit`."""
        if self._tokenizing[caller] >= (most := self._limits.tokenize_per_key):
            whose = "This key has" if has_key else "Callers without a key have together"
            raise self._refusal(f"{whose} {most} requests to tokenise in flight already.", "rate_limit_exceeded")
        with _counted(self._tokenizing, caller):
            yield

    @contextmanager
    def admit_page(self) -> Iterator[None]:
        """Hold a place within the block for a page or a file of one. Raises an `ApiError` when there is none."""
        if self._pages >= PAGE_REQUESTS:
            raise self._refusal(f"{PAGE_REQUESTS} requests for pages are in flight already.", "overloaded")
        self._pages += 1
        try:
            yield
        finally:
            self._pages -= 1

    def _check_callers(self, caller: str, has_key: bool) -> None:
        most = self._limits.requests_per_key
        if self._callers[caller] >= most:
            told = f"This key has {most} requests in flight, as many as it may have."
            if not has_key:
                told = f"Callers without a key have {most} requests in flight, as many as they may have together."
            raise self._refusal(told, "rate_limit_exceeded")
        if self._callers.total() >= self._limits.requests:
            raise self._refusal("The endpoint has as many requests in flight as it takes.", "overloaded")

    def _refusal(self, message: str, code: str) -> ApiError:
        seconds = str(max(1, int(self.retry_after_s())))
        return ApiError(
            429,
            f"{message} Try again in {seconds} s.",
            type="rate_limit_error",
            code=code,
            headers={"retry-after": seconds},
        )


@contextmanager
def _counted(room: Counter[str], caller: str) -> Iterator[None]:
    room[caller] += 1
    try:
        yield
    finally:
        room[caller] -= 1
        if not room[caller]:
            del room[caller]


SMOOTHING = 0.05
"""Weight of the newest request in the mean: the last twenty or so count."""

LONGEST_S = 60


class RetryAfter:
    """Estimates how long to wait from a running mean of the time a request takes.

    After that long, what fills the endpoint now has been answered.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count a request that was answered."""
        self._mean_s += SMOOTHING * (seconds - self._mean_s)

    def seconds(self) -> int:
        """Return the seconds to wait, at least 1."""
        return max(1, min(LONGEST_S, math.ceil(self._mean_s)))

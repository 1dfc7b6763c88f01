"""Limit the requests in flight: per key, in this process, and separately for operators and for pages.

In:    the beginning and the end of each request; unless the request is for a page, its caller and the role that its
       path needs.
Out:   a place, or an `ApiError` 429 that says when to try again.
Never: waits, or keeps a place after the request has ended, however it ended.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.serve.middleware.api_keys import Role

OPERATOR_REQUESTS = 16
"""Maximum number of requests in flight on operators' paths. They have a limit of their own so that operators can act
under overload."""

PAGE_REQUESTS = 64
"""Maximum number of requests in flight for pages and their files, which need no key."""


class Admission:
    """Counts requests in flight in one process. Use it on one event loop."""

    def __init__(self, limits: RequestLimits, retry_after_s: Callable[[], int], *, has_keys: bool) -> None:
        self._limits = limits
        self._whose = "This key has" if has_keys else "Callers without a key together have"
        self.retry_after_s = retry_after_s
        self._callers: Counter[str] = Counter()
        self._operators: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._further: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Further places that requests hold, by their kind."""

    @property
    def in_flight(self) -> dict[str, int]:
        """Number of requests in flight by key. Idle keys are left out, so that removed keys take no memory."""
        # Copy the counters before adding them, because another thread may read while they change.
        return dict(Counter(dict(self._callers)) + Counter(dict(self._operators)))

    @contextmanager
    def admit(self, caller: str, role: Role) -> Iterator[None]:
        """Hold a place, within the block, for a request whose path needs `role`.

        Raises an `ApiError` if no place is free.
        """
        if role == "operate":
            counts = self._operators
            if counts.total() >= OPERATOR_REQUESTS:
                raise self._refusal(f"{OPERATOR_REQUESTS} requests of operators are in flight already.", "overloaded")
        else:
            counts = self._callers
            self._check(counts, caller, self._limits.requests_per_key, "requests")
            if counts.total() >= self._limits.requests:
                raise self._refusal("The endpoint has the maximum number of requests in flight.", "overloaded")
        with _counted(counts, caller):
            yield

    @contextmanager
    def admit_further(self, kind: str, caller: str, limit: int) -> Iterator[None]:
        """Hold one of the `limit` places of a caller for requests of a kind, such as "uploads", within the block.

        The request has a place from `admit` as well. Raises an `ApiError` if no place is free.
        """
        self._check(self._further[kind], caller, limit, kind)
        with _counted(self._further[kind], caller):
            yield

    @contextmanager
    def admit_page(self) -> Iterator[None]:
        """Hold a place for a page or one of its files within the block. Raises an `ApiError` if all are taken."""
        if self._pages.total() >= PAGE_REQUESTS:
            raise self._refusal(f"{PAGE_REQUESTS} requests for pages are in flight already.", "overloaded")
        with _counted(self._pages, ""):
            yield

    def _check(self, counts: Counter[str], caller: str, limit: int, kind: str) -> None:
        if counts[caller] >= limit:
            raise self._refusal(f"{self._whose} {limit} {kind} in flight already.", "rate_limit_exceeded")

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
def _counted(counts: Counter[str], caller: str) -> Iterator[None]:
    counts[caller] += 1
    try:
        yield
    finally:
        counts[caller] -= 1
        if not counts[caller]:
            del counts[caller]


SMOOTHING = 0.05
"""Weight of the newest request in the mean, which covers roughly the last twenty requests."""

LONGEST_S = 60


class RetryAfter:
    """Estimates when a refused caller should retry, from a running mean of the time that a request takes.

    After this time, the requests that fill the endpoint now have probably been answered.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add the duration of an answered request to the mean."""
        self._mean_s += SMOOTHING * (seconds - self._mean_s)

    def seconds(self) -> int:
        """Return the seconds to wait, at least 1."""
        return max(1, min(LONGEST_S, math.ceil(self._mean_s)))

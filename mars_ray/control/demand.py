"""The demand on a replica, measured from its reports.

In:    reports in any order, possibly more than once.
Out:   the rate and the mean sizes of requests, by class of service; the tokens generated per second.
Never: counts a request twice because a report arrived twice.
"""

import math
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from mars_ray.control.replica_messages import ReplicaReport
from mars_ray.engine.stats.state import ClassState

RATE_S = 8.0
"""Seconds over which arrivals are counted; variation over shorter times is noise."""
JUMP_S = 2.0
JUMP_SIGMAS = 2.0
"""The arrival rate is at least that of the last `JUMP_S` seconds less `JUMP_SIGMAS` standard deviations, so that sudden
load counts at once but random variation does not."""
SIZES_S = 60.0
"""Seconds over which the sizes of requests are averaged."""
TOKENS_AT_FIRST = 128.0
"""Assumed length of an answer, in tokens, until the first answer has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDemand:
    """Demand of one class of service on one replica, or on all replicas together."""

    name: str
    requests_s: float
    """Sequences that arrive per second."""
    prompt_tokens: float
    """Mean prompt length in tokens."""
    output_tokens: float
    """Mean answer length in tokens."""
    running: float
    waiting: float


class DemandMeter:
    """Demand on one replica, measured from its reports. `last` is the newest report."""

    def __init__(self, first: ReplicaReport) -> None:
        self._reports = deque([first])
        self._demand: tuple[ClassDemand, ...] | None = None
        """Demand as of the last report; None until it is computed."""
        self.last = first

    def observe(self, report: ReplicaReport) -> bool:
        """Add a report and return True. If it is not newer than all earlier reports, ignore it and return False."""
        if report.number <= self.last.number:
            return False
        # Earlier reports cannot be compared if the replica's clock was set back, or a new engine counts from 0.
        if report.seconds < self.last.seconds or _counts_anew(self.last, report):
            self._reports.clear()
        self._reports.append(report)
        while report.seconds - self._reports[0].seconds > SIZES_S and len(self._reports) > 2:
            self._reports.popleft()
        self.last = report
        self._demand = None
        return True

    def demand(self) -> tuple[ClassDemand, ...]:
        """Return the demand of each class, in the order of the report."""
        if self._demand is None:
            self._demand = tuple(self._demand_of(now) for now in self.last.state.classes)
        return self._demand

    def tokens_s(self) -> float | None:
        """Return the tokens generated per second.

        A running sequence counts as half done; otherwise the first seconds would look idle. The result is None until
        the reports span `JUMP_S` seconds and, in each class, at least as many sequences have ended as are running.
        """
        start = self._start(RATE_S)
        tokens = 0.0
        seconds = self.last.seconds - start.seconds
        for now in self.last.state.classes:
            before = _class(start, now.name)
            if before is None or now.ended < now.running or seconds < JUMP_S:
                return None
            mean_tokens = now.tokens / max(1, now.ended)
            tokens += now.tokens - before.tokens + (now.running - before.running) * mean_tokens / 2
        return max(0.0, tokens) / seconds

    def _demand_of(self, now: ClassState) -> ClassDemand:
        arrived, seconds = self._arrived(now, RATE_S)
        recent, recent_s = self._arrived(now, JUMP_S)
        rate = arrived / seconds if seconds > 0 else 0.0
        jump = (recent - JUMP_SIGMAS * math.sqrt(recent)) / recent_s if recent_s > 0 else 0.0
        return _demand(now, _class(self._reports[0], now.name), max(rate, jump))

    def _arrived(self, now: ClassState, window_s: float) -> tuple[int, float]:
        """Return the number of arrivals within the window, and the seconds that the reports in the window span."""
        start = self._start(window_s)
        before = _class(start, now.name)
        return max(0, now.arrived - before.arrived) if before else 0, self.last.seconds - start.seconds

    def _start(self, window_s: float) -> ReplicaReport:
        recent = takewhile(lambda report: self.last.seconds - report.seconds <= window_s, reversed(self._reports))
        return deque(recent, maxlen=1)[0]


def _counts_anew(before: ReplicaReport, report: ReplicaReport) -> bool:
    """Return whether a count of a class has fallen since the report before."""
    return any(
        now.arrived < old.arrived or now.ended < old.ended or now.tokens < old.tokens
        for now in report.state.classes
        if (old := _class(before, now.name))
    )


def _class(report: ReplicaReport, name: str) -> ClassState | None:
    return next((state for state in report.state.classes if state.name == name), None)


def _demand(now: ClassState, old: ClassState | None, requests_s: float) -> ClassDemand:
    # Average the sizes of requests since `old`, or of all requests so far if none came since then.
    arrived = now.arrived
    prompt_tokens = now.prompt_tokens - now.cached_tokens
    if old is not None and now.arrived > old.arrived:
        arrived -= old.arrived
        prompt_tokens -= old.prompt_tokens - old.cached_tokens
    ended = now.ended
    tokens = now.tokens
    if old is not None and now.ended != old.ended:
        ended -= old.ended
        tokens -= old.tokens
    return ClassDemand(
        name=now.name,
        requests_s=requests_s,
        prompt_tokens=max(0, prompt_tokens) / max(1, arrived),
        output_tokens=max(1.0, tokens / ended) if ended > 0 else TOKENS_AT_FIRST,
        running=now.running,
        waiting=now.waiting,
    )

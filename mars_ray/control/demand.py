"""The demand on a replica, measured from its reports.

In:    reports in any order, some twice.
Out:   requests a second and their sizes, by class of service; tokens a second.
Never: counts a request again because its report came again.
"""

import math
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from mars_ray.control.replica_messages import ReplicaReport
from mars_ray.engine.stats.state import ClassState

RATE_S = 8.0
"""Seconds over which arrivals are counted: what is shorter is noise."""
JUMP_S = 2.0
JUMP_SIGMAS = 2.0
"""Arrivals of the last `JUMP_S` seconds count too, as far as they are more than chance, of so many standard deviations,
explains."""
SIZES_S = 60.0
"""Seconds over which the sizes of requests are averaged."""
TOKENS_AT_FIRST = 128.0
"""Assumed length of an answer before the first one has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDemand:
    """The demand of one class of service on one replica, or on all together."""

    name: str
    requests_s: float
    """Sequences that arrive each second."""
    prompt_tokens: float
    """Mean length of their prompts."""
    output_tokens: float
    """Mean length of their answers."""
    running: float
    waiting: float


class DemandMeter:
    """The demand on one replica. `last` is its newest report."""

    def __init__(self, first: ReplicaReport) -> None:
        self._reports = deque([first])
        self._demand: tuple[ClassDemand, ...] | None = None
        """The demand, once it was asked for after the last report."""
        self.last = first

    def observe(self, report: ReplicaReport) -> bool:
        """Add a report; return False, without effect, if it is not newer than all before."""
        if report.number <= self.last.number:
            return False
        if report.seconds < self.last.seconds:  # its clock was set back: nothing before can be compared
            self._reports.clear()
        self._reports.append(report)
        while report.seconds - self._reports[0].seconds > SIZES_S and len(self._reports) > 2:
            self._reports.popleft()
        self.last, self._demand = report, None
        return True

    def demand(self) -> tuple[ClassDemand, ...]:
        """Return the demand by class, in the order of the report."""
        if self._demand is None:
            self._demand = tuple(self._demand_of(now) for now in self.last.state.classes)
        return self._demand

    def tokens_s(self) -> float | None:
        """Return the tokens generated each second; None before as many sequences ended as run.

        A sequence that runs counts as half done, or the first seconds would look idle.
        """
        start, tokens = self._start(RATE_S), 0.0
        seconds = self.last.seconds - start.seconds
        for now in self.last.state.classes:
            before = _class(start, now.name)
            if before is None or now.ended < now.running or seconds < JUMP_S:
                return None
            usual = now.tokens / max(1, now.ended)
            tokens += now.tokens - before.tokens + (now.running - before.running) * usual / 2
        return max(0.0, tokens) / seconds

    def _demand_of(self, now: ClassState) -> ClassDemand:
        usual, usual_s = self._arrived(now, RATE_S)
        sudden, sudden_s = self._arrived(now, JUMP_S)
        rate = usual / usual_s if usual_s > 0 else 0.0
        jump = (sudden - JUMP_SIGMAS * math.sqrt(sudden)) / sudden_s if sudden_s > 0 else 0.0
        return _demand(now, _class(self._reports[0], now.name), max(rate, jump))

    def _arrived(self, now: ClassState, window_s: float) -> tuple[int, float]:
        """Return the arrivals within the window, and the seconds that they span."""
        start = self._start(window_s)
        before = _class(start, now.name)
        return max(0, now.arrived - before.arrived) if before else 0, self.last.seconds - start.seconds

    def _start(self, window_s: float) -> ReplicaReport:
        lately = takewhile(lambda each: self.last.seconds - each.seconds <= window_s, reversed(self._reports))
        return deque(lately, maxlen=1)[0]


def _class(report: ReplicaReport, name: str) -> ClassState | None:
    return next((each for each in report.state.classes if each.name == name), None)


def _demand(now: ClassState, old: ClassState | None, requests_s: float) -> ClassDemand:
    # Sizes of what came lately, or of all that ever came where nothing did.
    came = (now.arrived, now.prompt_tokens) if old is None or now.arrived == old.arrived else _less(now, old)[:2]
    ended = (now.ended, now.tokens) if old is None or now.ended == old.ended else _less(now, old)[2:]
    return ClassDemand(
        name=now.name,
        requests_s=requests_s,
        prompt_tokens=max(0, came[1]) / max(1, came[0]),
        output_tokens=max(1.0, ended[1] / ended[0]) if ended[0] > 0 else TOKENS_AT_FIRST,
        running=now.running,
        waiting=now.waiting,
    )


def _less(now: ClassState, old: ClassState) -> tuple[int, int, int, int]:
    return (
        now.arrived - old.arrived,
        now.prompt_tokens - old.prompt_tokens,
        now.ended - old.ended,
        now.tokens - old.tokens,
    )

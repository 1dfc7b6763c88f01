"""The messages between replica and controller: a report once a second, and the directive that answers.

In:    the state of an engine.
Out:   a frozen report whose every number is finite and not negative, and shares at most 1.
Never: trusts the sender: a report may come late, twice, or from a version that lacks a field.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any

from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import ReportError

SHARES = frozenset({"threshold", "agreement", "kv_cache_usage"})
"""Fields that are shares, and so at most 1."""
PLAIN = frozenset({int, float})
MOST = 1e300
NAMES = frozenset({"replica", "name"})
OPTIONAL = frozenset({"step_time", "agreement", "ttft_p95_s", "tpot_p95_s"})
"""Fields that are None before anything was measured."""
_checked = deque[object]([()], maxlen=1)
"""The profile that was found right last: simulated replicas all report the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One heartbeat. Raises `ReportError` for invalid values."""

    replica: str
    number: int
    """Number of the heartbeat; it rises."""
    seconds: float
    """Seconds on the clock of the replica, which is compared with itself only."""
    state: EngineState

    def __post_init__(self) -> None:
        _check("report", "report", self)
        state = self.state
        if state.profile is not _checked[0]:
            self._check_blocks()
            _checked.append(state.profile)
        if not state.classes:
            raise ReportError("report.state.classes is empty; there is at least one class.")
        if state.max_num_seqs < 1:
            raise ReportError(f"report.state.max_num_seqs is {state.max_num_seqs}; it must be at least 1.")
        time = state.step_time
        if time is not None and not time.fixed_s + time.seq_s + time.position_s:
            raise ReportError("report.state.step_time is 0 for a step without prompts; it takes some time.")

    def _check_blocks(self) -> None:
        by_block = [each for point in self.state.profile for each in (point.tokens, point.positions)]
        if len(set(map(len, by_block))) > 1:
            raise ReportError("report.state.profile has blocks of several lengths; each point has one for each block.")
        if any(not each or min(each) < 1 for each in by_block):
            raise ReportError("report.state.profile has less than one token or position in a forward.")

    def __reduce__(self) -> tuple[Callable[[], "ReplicaReport"], tuple[()]]:
        # Whoever unpickles a report goes through its constructor, and so checks it.
        return partial(ReplicaReport, **{each.name: getattr(self, each.name) for each in fields(self)}), ()


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a class, none for what has no fields."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()


def _check(name: str, place: str, value: Any) -> None:
    if names := _fields(type(value)):  # type: ignore[arg-type]  # classes can be hashed
        for each in names:
            if not hasattr(value, each):
                raise ReportError(f"{place}.{each} is missing.")
            field = getattr(value, each)
            if not (type(field) in PLAIN and 0 <= field <= (1 if each in SHARES else MOST)):  # as nearly all are
                _check(each, f"{place}.{each}", field)
    elif isinstance(value, tuple):
        if value is _checked[0] or _are_plain(value, 1 if name in SHARES else math.inf):
            return
        for number, each in enumerate(value):
            _check(name, f"{place}[{number}]", each)
    elif name in NAMES:
        if not isinstance(value, str) or not value:
            raise ReportError(f"{place} is {value!r}; it must be a name.")
    elif value is not None or name not in OPTIONAL:
        most = 1 if name in SHARES else math.inf
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 <= value <= most and math.isfinite(value)):
            allowed = "from 0 to 1" if most == 1 else "a finite number, at least 0"
            raise ReportError(f"{place} is {value!r}; it must be {allowed}.")


def _are_plain(values: tuple[Any, ...], most: float) -> bool:
    """Say whether all are fine numbers, as nearly always; a profile has hundreds, and a controller reads many."""
    return (
        bool(values)
        and PLAIN.issuperset(map(type, values))
        and math.isfinite(sum(values))
        and min(values) >= 0
        and (most == math.inf or max(values) <= most)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """Thresholds for one replica. Raises `ReportError` for values out of range."""

    replica: str
    answers: int
    """Number of the report that this answers."""
    controller: str
    """Unique id of the controller that decided."""
    epoch: int
    """Number of the decision of the controller that this comes from."""
    thresholds: Mapping[str, float]
    """Threshold of each class of service, for requests that name none."""
    reasons: Mapping[str, str]
    """Why the threshold of each class is what it is."""
    lease_s: float
    """Seconds for which this holds after the report was made."""
    desired_replicas: int
    """Replicas that demand needs at full quality, for the autoscaler."""
    paused: bool
    """Whether a worker of a batch job takes no new rows; replicas that serve callers are never paused."""

    def __post_init__(self) -> None:
        for name, value in self.thresholds.items():
            if not 0 <= value <= 1:
                raise ReportError(f"the threshold of class {name} is {value}; it must be from 0 to 1.")
        if not (math.isfinite(self.lease_s) and self.lease_s > 0):
            raise ReportError(f"lease_s is {self.lease_s}; it must be above 0.")
        if self.desired_replicas < 0:
            raise ReportError(f"desired_replicas is {self.desired_replicas}; it must be at least 0.")

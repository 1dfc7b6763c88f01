"""The messages between replica and controller: a report once a second, and the directive that answers it.

In:    the state of an engine.
Out:   a frozen report in which every number is finite and not negative, and every share is at most 1.
Never: trusts the sender. A report may arrive late or twice, or lack a field because its sender runs another version.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from mars_ray.engine.stats.profile import Share
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import ReportError

PLAIN = frozenset({int, float})
MOST = 1e300
_checked = deque[object]([()], maxlen=1)
"""The profile that was last found valid. Simulated replicas all report the same object, so that it is checked only
once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """Report of a replica, sent with each heartbeat. Raises `ReportError` for invalid values."""

    replica: str
    number: int
    """Number of the heartbeat, which rises from report to report."""
    seconds: float
    """Time on the replica's own clock, comparable only with other reports of this replica."""
    state: EngineState
    price_per_hour: float | None = None
    """Price of the replica for an hour; None if the operator set none."""

    def __post_init__(self) -> None:
        _check(_Rule(), "report", self)
        state = self.state
        if state.profile is not _checked[0]:
            self._check_blocks()
            _checked.append(state.profile)
        if not state.classes:
            raise ReportError("report.state.classes is empty; it must have at least one class.")
        if state.max_num_seqs < 1:
            raise ReportError(f"report.state.max_num_seqs is {state.max_num_seqs}; it must be at least 1.")
        time = state.step_time
        if time is not None and not time.fixed_s + time.seq_s + time.position_s:
            raise ReportError("report.state.step_time is 0 for a step without prompts; it must be above 0.")

    def _check_blocks(self) -> None:
        figures = [by_block for point in self.state.profile for by_block in (point.tokens, point.positions)]
        if len(set(map(len, figures))) > 1:
            raise ReportError("report.state.profile has points for different numbers of blocks; all need the same.")
        if any(not by_block or min(by_block) < 1 for by_block in figures):
            raise ReportError("report.state.profile has fewer than 1 token or position per forward; give at least 1.")

    def __reduce__(self) -> tuple[Callable[[], "ReplicaReport"], tuple[()]]:
        # Unpickling calls the constructor, so that received reports are checked too.
        return partial(ReplicaReport, **{field.name: getattr(self, field.name) for field in fields(self)}), ()


@dataclass(frozen=True, slots=True)
class _Rule:
    """Values that a field may have, read from its type."""

    most: float = MOST
    """Largest number; 1 for a share."""
    name: bool = False
    """Whether the value is text, which must not be empty."""
    optional: bool = False
    """Whether the value may be None."""


@cache
def _rules(kind: type) -> tuple[tuple[str, _Rule], ...]:
    """Return the names of a dataclass's fields with their rules; an empty tuple for any other class."""
    return tuple((field.name, _rule(field.type)) for field in fields(kind)) if is_dataclass(kind) else ()


def _rule(kind: Any) -> _Rule:
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return _Rule(1.0 if Share in kinds else MOST, str in kinds, NoneType in kinds)


def _check(rule: _Rule, path: str, value: Any) -> None:
    if rules := _rules(type(value)):  # type: ignore[arg-type]  # classes can be hashed
        for field_name, field_rule in rules:
            if not hasattr(value, field_name):
                raise ReportError(f"{path}.{field_name} is missing.")
            item = getattr(value, field_name)
            # Valid numbers, which nearly all fields are, need no further call.
            if not (type(item) in PLAIN and 0 <= item <= field_rule.most and not field_rule.name):
                _check(field_rule, f"{path}.{field_name}", item)
    elif isinstance(value, tuple):
        if value is _checked[0] or _are_plain(value, rule.most):
            return
        for index, item in enumerate(value):
            _check(rule, f"{path}[{index}]", item)
    elif value is None and rule.optional:
        return
    elif rule.name:
        if not isinstance(value, str) or not value:
            raise ReportError(f"{path} is {value!r}; it must be a name.")
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= rule.most and math.isfinite(value)):
            allowed = "from 0 to 1" if rule.most == 1 else "a finite number, at least 0"
            raise ReportError(f"{path} is {value!r}; it must be {allowed}.")


def _are_plain(values: tuple[Any, ...], most: float) -> bool:
    """Return whether all values are valid numbers, as they nearly always are.

    This check must be fast, because a profile has hundreds of numbers and a controller reads many profiles.
    """
    return (
        bool(values)
        and PLAIN.issuperset(map(type, values))
        and math.isfinite(sum(values))
        and min(values) >= 0
        and (most == MOST or max(values) <= most)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """Thresholds for one replica. Raises `ReportError` for values out of range."""

    replica: str
    answers: int
    """Number of the report that this directive answers."""
    controller: str
    """Unique id of the controller that decided."""
    thresholds: Mapping[str, float]
    """Threshold of each class of service, for requests that set none."""
    lease_s: float
    """Seconds for which the directive holds, counted from the time when the report was made."""
    desired_replicas: int
    """Number of replicas that the demand needs at full quality, for the autoscaler."""
    paused: bool
    """Whether the workers of a batch job take no new rows. Replicas that serve callers are never paused."""

    def __post_init__(self) -> None:
        for name, value in self.thresholds.items():
            if not 0 <= value <= 1:
                raise ReportError(f"the threshold of class {name} is {value}; it must be from 0 to 1.")
        if not (math.isfinite(self.lease_s) and self.lease_s > 0):
            raise ReportError(f"lease_s is {self.lease_s}; it must be above 0.")
        if self.desired_replicas < 0:
            raise ReportError(f"desired_replicas is {self.desired_replicas}; it must be at least 0.")

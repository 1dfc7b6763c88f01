"""What a replica tells the controller once a second.

In:    the state of an engine.
Out:   a frozen report whose every number is one: finite, not negative, shares at most 1.
Never: trusts the sender: a report may come late, twice, or from a version that lacks a field.
"""

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from mars_ray.engine.state import EngineState
from mars_ray.errors import ReportError

SHARES = frozenset({"threshold", "survival", "agreement", "kv_use"})
"""Fields that are at most 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One heartbeat. Raises `ReportError` for what cannot be."""

    replica: str
    number: int
    """Which heartbeat of this replica; rises."""
    seconds: float
    """By the clock of the replica, which is compared with itself only."""
    state: EngineState

    def __post_init__(self) -> None:
        _check("report", self)
        if not self.state.classes:
            raise ReportError("report.state.classes is empty; there is at least one class.")


def _check(place: str, value: Any) -> None:
    if is_dataclass(value):
        for each in fields(value):
            if not hasattr(value, each.name):
                raise ReportError(f"{place}.{each.name} is missing.")
            _check(f"{place}.{each.name}", getattr(value, each.name))
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            _check(f"{place}[{number}]", each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        most = 1 if place.split(".")[-1].split("[")[0] in SHARES else math.inf
        if not (math.isfinite(value) and 0 <= value <= most):
            allowed = "from 0 to 1" if most == 1 else "a finite number, at least 0"
            raise ReportError(f"{place} is {value}; it must be {allowed}.")
    elif value is not None and not isinstance(value, str):
        raise ReportError(f"{place} is {value!r}; it must be a number.")

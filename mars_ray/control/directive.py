"""What the controller tells a replica, in answer to a report.

In:    a decision.
Out:   a frozen directive whose every value is in range.
Never: holds for longer than its lease, which begins when the report it answers was made.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mars_ray.errors import ReportError


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """Thresholds for one replica. Raises `ReportError` for values out of range."""

    replica: str
    answers: int
    """Number of the report it answers."""
    epoch: int
    """Which decision of the controller it comes from."""
    thresholds: Mapping[str, float]
    """By class of service, of requests that name none."""
    reasons: Mapping[str, str]
    """Why, by class."""
    lease_s: float
    """So long after the report was made it holds."""
    desired_replicas: int
    """What demand needs at full quality; for the autoscaler."""
    paused: bool
    """A worker of a batch job takes no new rows; replicas that serve callers are never paused."""

    def __post_init__(self) -> None:
        for name, value in self.thresholds.items():
            if not 0 <= value <= 1:
                raise ReportError(f"the threshold of class {name} is {value}; it must be from 0 to 1.")
        if not (math.isfinite(self.lease_s) and self.lease_s > 0):
            raise ReportError(f"lease_s is {self.lease_s}; it must be above 0.")
        if self.desired_replicas < 0:
            raise ReportError(f"desired_replicas is {self.desired_replicas}; it must be at least 0.")

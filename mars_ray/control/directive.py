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
    """Number of the report that this answers."""
    controller: str
    """Which controller decided, by a name that no other has, before or after."""
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

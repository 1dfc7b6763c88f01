"""What is left of a batch job, and how fast it gets done.

In:    what the driver of the job counts, what the reports of its workers add up to.
Out:   frozen figures for the policy `deadline`.
Never: holds a number that is not finite.
"""

import math
from dataclasses import dataclass

from mars_ray.errors import ReportError


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What a driver tells the controller of its job. Raises `ReportError` for what cannot be."""

    tokens: float
    """Tokens still to be generated, as far as is known; rows that run count in full, which leaves time for the last."""
    seconds: float | None
    """Seconds left until the deadline, below 0 once it passed; None where there is none."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tokens) and self.tokens >= 0):
            raise ReportError(f"backlog.tokens is {self.tokens}; it must be a finite number, at least 0.")
        if self.seconds is not None and not math.isfinite(self.seconds):
            raise ReportError(f"backlog.seconds is {self.seconds}; it must be a finite number, or None.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJobState:
    """A batch job at the moment thresholds are decided."""

    backlog: Backlog
    threshold: float
    """The threshold in force, the mean of all workers."""
    tokens_s: float | None
    """Tokens that all workers generate each second; None before that was measured."""

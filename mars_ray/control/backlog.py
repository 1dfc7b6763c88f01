"""What is left of a batch job, and how fast it gets done.

In:    what the driver of the job counts, what the reports of its workers add up to.
Out:   frozen figures for the law `deadline`.
Never: holds a number that is none.
"""

import math
from dataclasses import dataclass

from mars_ray.errors import ReportError


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What a driver tells the controller of its job. Raises `ReportError` for what cannot be."""

    tokens: float
    """Still to be generated, as far as is known; rows that run count whole, which leaves time for the last of them."""
    seconds: float | None
    """Left until the deadline, below 0 once it passed; None where there is none."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tokens) and self.tokens >= 0):
            raise ReportError(f"backlog.tokens is {self.tokens}; it must be a finite number, at least 0.")
        if self.seconds is not None and not math.isfinite(self.seconds):
            raise ReportError(f"backlog.seconds is {self.seconds}; it must be a finite number, or None.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A batch job at the moment thresholds are decided."""

    backlog: Backlog
    threshold: float
    """In force, the mean of all workers."""
    tokens_s: float | None
    """Generated each second by all workers; None before that was measured."""

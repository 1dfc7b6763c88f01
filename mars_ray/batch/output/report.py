"""The metrics of a job while it runs, and its report."""

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["complete", "complete with errors", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacePoint:
    """Metrics of one span of a job."""

    second: float
    """End of the span in seconds since the start of the job, without pauses between runs."""
    rows: int
    errors: int
    tokens: int
    forwards: int
    threshold: float
    """Mean threshold in the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of a histogram, for values from `low` up to but excluding `high`."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """Metrics of a job so far, over all of its runs."""

    status: Status
    rows: int
    """Rows that are done: answered, or in the errors file."""
    total: int
    """Rows of the input."""
    errors: int
    errors_by_reason: dict[str, int]
    """Errors of each kind, most first, under the reason of one of them; others differ in names and numbers."""
    errors_file: str
    """Path of the errors file; empty without errors."""
    cut: int
    """Sequences that ended at the length limit."""
    tokens: int
    forwards: int
    """Forwards, summed over the sequences. A forward of a batch counts once for each of its sequences."""
    tokens_per_s: float
    """Tokens per second of all workers, over `seconds`."""
    tokens_per_forward: float
    seconds: float
    """Seconds that the job ran, without pauses between runs."""
    runs: int
    """Number of times that the job was started."""
    workers: int
    model: str
    settings: dict[str, Any]
    output: str
    pace: tuple[PacePoint, ...]
    lengths: tuple[Bar, ...]
    """Histogram of tokens per sequence."""
    ahead: tuple[Bar, ...]
    """Histogram of tokens per forward."""
    samples: tuple[dict[str, Any], ...]
    """Some records of the output."""
    deadline: str
    """Time by which the job met or missed its deadline; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    """Metrics of one worker over the last seconds."""

    name: str
    rows: int
    """Rows done since this run began."""
    running: int
    """Running sequences."""
    tokens_per_s: float
    tokens_per_forward: float | None
    """Tokens per forward of finished rows; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetrics:
    """Metrics of a running job."""

    done: int
    total: int
    errors: int
    running: int
    """Running sequences."""
    tokens: int
    """Tokens generated so far, with those of running sequences."""
    tokens_per_s: float | None
    """Tokens per second of all workers over the last seconds; None before the first measurement."""
    tokens_per_forward: float | None
    """Tokens per forward of finished rows; None before the first."""
    threshold: float | None
    """Threshold of the last finished row; None if nothing was generated."""
    eta_s: float | None
    """Estimated seconds until the end of the job; None before the first row is done."""
    note: str
    """A message for the user, such as a deadline that cannot be met; often empty."""
    workers: tuple[WorkerMetrics, ...]

"""Metrics of a running job, and the report of a job."""

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["complete", "complete with errors", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacePoint:
    """Metrics of one time span of a job."""

    second: float
    """End of the time span, in seconds since the start of the job, without pauses between runs."""
    rows: int
    errors: int
    tokens: int
    forwards: int
    threshold: float
    """Mean threshold in the time span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of a histogram, for values from `low` (inclusive) to `high` (exclusive)."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """Metrics of a job so far, over all of its runs."""

    status: Status
    rows: int
    """Number of finished rows, either answered or in the errors file."""
    total: int
    """Number of rows in the input."""
    errors: int
    errors_by_reason: dict[str, int]
    """Number of errors by reason, most frequent first. Reasons that differ only in quoted names or numbers count as the
    same reason."""
    errors_file: str
    """Path of the errors file; empty if there are no errors."""
    cut: int
    """Number of sequences that ended at the length limit."""
    tokens: int
    forwards: int
    """Number of forwards, summed over the sequences. A forward of a batch counts once for each sequence in the
    batch."""
    tokens_per_s: float
    """Tokens per second of all workers, averaged over `seconds`."""
    tokens_per_forward: float
    seconds: float
    """Seconds that the job has run, without pauses between runs."""
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
    """Some records of the output, as examples."""
    deadline: str
    """Text that says by how much the job met or missed its deadline; empty if the job has no deadline."""
    notes: tuple[str, ...] = ()
    """Files that the last run left out, and columns that the output has in another form or not at all, one sentence
    each."""
    notice: str = ""
    """Sentence that goes with all these figures; usually empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    """Metrics of one worker."""

    name: str
    rows: int
    """Number of rows finished since this run began."""
    running: int
    """Number of running sequences."""
    tokens_per_s: float
    tokens_per_forward: float | None
    """Tokens per forward in finished rows; None before the first row is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetrics:
    """Metrics of a running job."""

    done: int
    total: int
    errors: int
    running: int
    """Number of running sequences."""
    tokens: int
    """Number of tokens generated so far, including those of running sequences."""
    tokens_per_s: float | None
    """Tokens per second of all workers over the last few seconds, or in finished rows if no worker has reported; None
    before the first measurement."""
    tokens_per_forward: float | None
    """Tokens per forward in finished rows; None before the first row is finished."""
    threshold: float | None
    """Threshold of the last finished row; None if no row has generated tokens yet."""
    eta_s: float | None
    """Estimated seconds until the end of the job; None before the first row is finished."""
    note: str
    """Message for the user, for example that the deadline cannot be met; usually empty."""
    workers: tuple[WorkerMetrics, ...]

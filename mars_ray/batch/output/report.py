"""What a job did, in numbers: written to `report.json`, drawn in `report.html` and shown while it runs."""

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["complete", "complete with errors", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacePoint:
    """What was committed in some seconds of the run."""

    second: float
    """The end of the span in seconds since the job began, pauses between runs left out."""
    rows: int
    errors: int
    tokens: int
    forwards: int
    threshold: float
    """Mean threshold in force in the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a histogram: from `low` up to `high`, which is left out."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """A job up to now, runs before a resume included."""

    status: Status
    rows: int
    """Rows of the input that are done: answered, or in the errors file."""
    total: int
    """Rows of the input."""
    errors: int
    errors_by_reason: dict[str, int]
    """Errors of each kind, most first, under the reason of one of them; others differ in names and numbers."""
    errors_file: str
    """Where the rows with errors are; empty where there are none."""
    cut: int
    """Sequences that ended at the length limit."""
    tokens: int
    forwards: int
    """Forwards, summed over the sequences: one run of the network over a batch counts once for each sequence in it."""
    tokens_per_s: float
    """Tokens per second of all workers together, over the seconds the job ran."""
    tokens_per_forward: float
    seconds: float
    """Seconds the job ran, pauses between runs left out."""
    runs: int
    """How often the same command was started."""
    workers: int
    model: str
    settings: dict[str, Any]
    output: str
    pace: tuple[PacePoint, ...]
    lengths: tuple[Bar, ...]
    """Sequences by generated tokens."""
    ahead: tuple[Bar, ...]
    """Sequences by tokens per forward."""
    samples: tuple[dict[str, Any], ...]
    """Some records of the output."""
    deadline: str
    """How the end of the job stood to its deadline; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    """One worker, over the last seconds."""

    name: str
    rows: int
    """Rows done since this run began."""
    running: int
    """Sequences under way."""
    tokens_per_s: float
    tokens_per_forward: float | None
    """Tokens per forward of rows that are done; None before any is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetrics:
    """A job while it runs."""

    done: int
    total: int
    errors: int
    running: int
    """Sequences under way."""
    tokens: int
    """Tokens generated so far, those of sequences under way included."""
    tokens_per_s: float | None
    """Tokens per second over the last seconds, all workers together; None before it is known."""
    tokens_per_forward: float | None
    """Tokens per forward of rows that are done; None before any is."""
    threshold: float | None
    """The threshold of the last row that is done; None where nothing was generated."""
    eta_s: float | None
    """Seconds until the job is done; None before that can be told."""
    note: str
    """What a person should know now, such as a deadline that cannot be met; mostly empty."""
    workers: tuple[WorkerMetrics, ...]

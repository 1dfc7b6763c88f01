"""What a job did, as it is written to `report.json`, drawn in `report.html` and shown while it runs.

In:    nothing.
Out:   frozen records of numbers and words.
Never: computes anything.
"""

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["complete", "complete with errors", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacePoint:
    """What was committed in some seconds of the run."""

    second: float
    """Since the job began, pauses between runs left out; the end of the span."""
    rows: int
    errors: int
    tokens: int
    forwards: int
    threshold: float
    """In force at the end of the span."""


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
    tokens: int
    forwards: int
    """Summed over the sequences: one run of the network over a batch counts once for each sequence in it."""
    tokens_per_s: float
    """Of all workers together, over the seconds the job ran."""
    tokens_per_forward: float
    seconds: float
    """The job ran so long, pauses between runs left out."""
    runs: int
    """Starts of the same command."""
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
    """What became of it; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    """One worker, over the last seconds."""

    name: str
    rows: int
    """Since this run began."""
    running: int
    """Sequences under way."""
    tokens_per_s: float
    tokens_per_forward: float | None
    """Of rows that are done; None before any is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetrics:
    """A job while it runs."""

    done: int
    total: int
    errors: int
    running: int
    """Sequences under way."""
    tokens: int
    """So far, those of sequences under way included."""
    tokens_per_s: float | None
    """Over the last seconds, all workers together; None before it is known."""
    tokens_per_forward: float | None
    """Of rows that are done; None before any is."""
    threshold: float | None
    """None where every row names its own."""
    eta_s: float | None
    """None before it can be told."""
    note: str
    """What a person should know now, such as a deadline that cannot be met; mostly empty."""
    workers: tuple[WorkerMetrics, ...]

"""Outcomes as they arrive -> the output folder, and the figures of the job for those who watch it.

In:    tables of outcomes, in any order, from wherever they are made.
Out:   figures while it runs, a report at any time.
Never: knows who decodes.
"""

import json
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from mars_ray.batch.outcome import from_table
from mars_ray.batch.output import Output
from mars_ray.batch.report import JobFigures, JobReport, Status, WorkerFigures

RECENT_S = 30.0
"""Rates are those of so many seconds."""


class Job:
    """One run of a job of `total` rows."""

    def __init__(
        self, output: Output, *, total: int, workers: int, settings: dict[str, Any], clock: Callable[[], float]
    ) -> None:
        self._tokens = output.history.tokens
        self._output, self._total, self._workers, self._settings = output, total, workers, settings
        self._clock = clock
        self._started_s: float | None = None
        """When the first worker was ready: how long engines take to start says nothing about the job."""
        self._done, self._errors = output.ledger.done, sum(output.ledger.kinds().values())
        self._done_before = self._done
        self._recent: deque[tuple[float, str, int, int]] = deque()
        """When, from whom, tokens, forwards."""
        self._rows = Counter[str]()
        """By worker, of this run."""
        self._threshold: float | None = None
        output.history.begin()

    @property
    def errors(self) -> int:
        """Rows with errors."""
        return self._errors

    @property
    def left(self) -> int:
        """Rows still to do."""
        return max(0, self._total - self._done)

    @property
    def tokens_left(self) -> float | None:
        """Tokens that the rows still to do will take, if they are like those that are done; None before any is."""
        return self.left * self._tokens / self._done if self._done else None

    def take(self, table: pa.Table) -> None:
        """Write outcomes down. Raises `RunError` when that is not possible."""
        now_s, outcomes = self._clock(), from_table(table)
        if self._started_s is None:
            self._started_s = now_s - max((each.age_s for each in outcomes), default=0.0)
        tokens, forwards = Counter[str](), Counter[str]()
        for each in self._output.take(outcomes, now_s - self._started_s):
            self._done += 1
            self._errors += each.error is not None
            self._rows[each.worker] += 1
            self._threshold = each.threshold if each.threshold is not None else self._threshold
            tokens[each.worker] += sum(each.tokens)
            forwards[each.worker] += sum(each.forwards)
        self._tokens += tokens.total()
        self._recent.extend((now_s, worker, tokens[worker], forwards[worker]) for worker in tokens)

    def figures(self, note: str = "") -> JobFigures:
        """Return how the job is."""
        now_s = self._clock()
        while self._recent and now_s - self._recent[0][0] > RECENT_S:
            self._recent.popleft()
        ran_s = 0.0 if self._started_s is None else now_s - self._started_s
        span_s = max(1e-9, min(RECENT_S, ran_s))
        tokens, forwards = Counter[str](), Counter[str]()
        for _, worker, of_tokens, of_forwards in self._recent:
            tokens[worker] += of_tokens
            forwards[worker] += of_forwards
        here = self._done - self._done_before
        return JobFigures(
            done=self._done,
            total=self._total,
            errors=self._errors,
            tokens_per_s=tokens.total() / span_s,
            tokens_per_forward=tokens.total() / max(1, forwards.total()),
            threshold=self._threshold,
            eta_s=self.left * ran_s / here if here else None,
            note=note,
            workers=tuple(
                WorkerFigures(
                    name=worker,
                    rows=rows,
                    tokens_per_s=tokens[worker] / span_s,
                    tokens_per_forward=tokens[worker] / max(1, forwards[worker]),
                )
                for worker, rows in sorted(self._rows.items())
                if worker in tokens
            ),
        )

    def report(self, status: Status, *, model: str, deadline: str = "") -> JobReport:
        """Return what the job did up to now, in all of its runs."""
        history, ledger = self._output.history, self._output.ledger
        return JobReport(
            status=status,
            rows=self._done,
            total=self._total,
            errors=self._errors,
            errors_by_reason=ledger.kinds(),
            tokens=history.tokens,
            forwards=history.forwards,
            tokens_per_s=history.tokens / max(1e-3, history.seconds),
            tokens_per_forward=history.tokens / max(1, history.forwards),
            seconds=history.seconds,
            runs=history.runs,
            workers=self._workers,
            model=model,
            settings=self._settings,
            output=str(self._output.folder),
            pace=history.pace(),
            lengths=history.lengths(),
            ahead=history.ahead(),
            samples=tuple(json.loads(text) for text in history.samples()),
            deadline=deadline,
        )

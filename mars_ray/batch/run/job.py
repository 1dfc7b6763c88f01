"""Results as they arrive go to the output folder, and become the metrics of the job for those who watch it."""

import json
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from mars_ray.batch.output.folder import OutputFolder
from mars_ray.batch.output.report import JobMetrics, JobReport, Status, WorkerMetrics
from mars_ray.batch.rows.row_result import from_table
from mars_ray.batch.run.live_stats import LiveStats, worker_of
from mars_ray.batch.run.stage_backlog import estimate_tokens_left

RECENT_S = 30.0
"""Seconds that rates are taken over."""


class Job:
    """One run of a job of `total` rows."""

    def __init__(
        self, output: OutputFolder, *, total: int, workers: int, settings: dict[str, Any], clock: Callable[[], float]
    ) -> None:
        self._tokens = output.history.tokens
        self._output, self._total, self._workers, self._settings = output, total, workers, settings
        self._clock = clock
        self._started_s: float | None = None
        """When the first worker was ready: how long engines take to start says nothing about the job."""
        self._done, self._errors = output.ledger.done, sum(output.ledger.error_counts().values())
        self._done_before, self._tokens_before = self._done, self._tokens
        self._recent: deque[tuple[float, str, int, int]] = deque()
        """Recent additions: when, from which worker, tokens, forwards."""
        self._rows = Counter[str]()
        """Rows of each worker in this run."""
        self._threshold: float | None = None

    @property
    def errors(self) -> int:
        """Number of rows with errors."""
        return self._errors

    @property
    def left(self) -> int:
        """Number of rows still to do."""
        return max(0, self._total - self._done)

    def estimate_tokens_left(self) -> float:
        """Return the tokens that the rows still to do will take, if they are like those that are done."""
        return estimate_tokens_left(left=self.left, done=self._done, tokens=self._tokens)

    def add(self, table: pa.Table) -> None:
        """Write results down. Raises `RunError` when that is not possible."""
        now_s, results = self._clock(), from_table(table)
        if self._started_s is None:
            self._started_s = now_s - max((each.age_s for each in results), default=0.0)
        tokens, forwards = Counter[str](), Counter[str]()
        for each in self._output.take(results, now_s - self._started_s):
            self._done += 1
            self._errors += each.error is not None
            self._rows[each.worker] += 1
            self._threshold = each.threshold if each.threshold is not None else self._threshold
            tokens[each.worker] += sum(each.tokens)
            forwards[each.worker] += sum(each.forwards)
        self._tokens += tokens.total()
        self._recent.extend((now_s, worker, tokens[worker], forwards[worker]) for worker in tokens)

    def metrics(self, stats: LiveStats, note: str = "") -> JobMetrics:
        """Return how the job stands, sequences under way included."""
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
        rate = stats.tokens_per_s()
        running = Counter[str]()
        rates: dict[str, float] = {}
        for engine, under_way in stats.running.items():
            worker = worker_of(engine)
            running[worker] += under_way
            of_engine = stats.tokens_per_s(engine)
            if of_engine is not None:
                rates[worker] = rates.get(worker, 0.0) + of_engine
        return JobMetrics(
            done=self._done,
            total=self._total,
            errors=self._errors,
            running=sum(running.values()) if self.left else 0,  # the last reports are older than the last rows
            tokens=max(self._tokens, self._tokens_before + stats.tokens),
            tokens_per_s=rate if rate is not None else tokens.total() / span_s if tokens else None,
            tokens_per_forward=tokens.total() / forwards.total() if forwards.total() else None,
            threshold=self._threshold,
            eta_s=self.left * ran_s / here if here else None,
            note=note,
            workers=tuple(
                WorkerMetrics(
                    name=worker,
                    rows=self._rows[worker],
                    running=running.get(worker, 0),
                    tokens_per_s=rates.get(worker, tokens[worker] / span_s),
                    tokens_per_forward=tokens[worker] / forwards[worker] if forwards[worker] else None,
                )
                for worker in sorted(running.keys() | tokens.keys())
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
            errors_by_reason=ledger.error_counts(),
            errors_file=str(self._output.errors_file) if self._errors else "",
            cut=history.cut,
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

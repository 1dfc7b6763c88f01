"""Write results to the output folder as they arrive, and keep the metrics of the job."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from mars_ray.batch.output.folder import OutputFolder
from mars_ray.batch.output.report import JobMetrics, JobReport, Status, WorkerMetrics
from mars_ray.batch.rows.row_tables import RowResult, from_table
from mars_ray.batch.run.live_stats import LiveStats, RowBacklog, worker_of


class Job:
    """One run of a job with `total` rows. `on_row` is called with each result that is new."""

    def __init__(
        self,
        output: OutputFolder,
        *,
        total: int,
        workers: int,
        settings: dict[str, Any],
        clock: Callable[[], float],
        on_row: Callable[[RowResult], None] = lambda _: None,
    ) -> None:
        self._tokens = output.history.tokens
        self._output = output
        self._total = total
        self._workers = workers
        self._settings = settings
        self._clock = clock
        self._on_row = on_row
        self._started_s: float | None = None
        """Time at which the first worker was ready, so that the time to start the engines does not count."""
        self._done = self._done_before = output.ledger.done
        self._errors = sum(output.ledger.error_counts().values())
        self._tokens_before = self._tokens
        # Rows, tokens and forwards in the rows that each worker finished in this run.
        self._rows = Counter[str]()
        self._tokens_in_rows = Counter[str]()
        self._forwards_in_rows = Counter[str]()
        self._threshold: float | None = None

    @property
    def errors(self) -> int:
        """Number of rows with errors."""
        return self._errors

    @property
    def left(self) -> int:
        """Number of rows without a result."""
        return max(0, self._total - self._done)

    def estimate_tokens_left(self) -> float:
        """Return an estimate of the number of tokens in the rows without a result."""
        return RowBacklog(rows=self._total, done=self._done, tokens=self._tokens).tokens_left

    def add(self, table: pa.Table) -> None:
        """Write a table of results to the output. Raises `RunError` if writing fails."""
        now_s = self._clock()
        results = from_table(table)
        if self._started_s is None:
            self._started_s = now_s - max((result.age_s for result in results), default=0.0)
        for result in self._output.take(results, now_s - self._started_s):
            self._on_row(result)
            self._done += 1
            self._errors += result.error is not None
            self._rows[result.worker] += 1
            self._threshold = result.threshold if result.threshold is not None else self._threshold
            self._tokens += sum(result.tokens)
            self._tokens_in_rows[result.worker] += sum(result.tokens)
            self._forwards_in_rows[result.worker] += sum(result.forwards)

    def metrics(self, stats: LiveStats, note: str = "") -> JobMetrics:
        """Return the metrics of the job, including running sequences."""
        ran_s = 1e-9 if self._started_s is None else max(1e-9, self._clock() - self._started_s)
        tokens = self._tokens_in_rows
        forwards = self._forwards_in_rows
        done_in_run = self._done - self._done_before
        rate = stats.tokens_per_s()
        running = Counter[str]()
        rates: dict[str, float] = {}
        for engine, sequences in stats.running.items():
            worker = worker_of(engine)
            running[worker] += sequences
            engine_rate = stats.tokens_per_s(engine)
            if engine_rate is not None:
                rates[worker] = rates.get(worker, 0.0) + engine_rate
        return JobMetrics(
            done=self._done,
            total=self._total,
            errors=self._errors,
            running=sum(running.values()) if self.left else 0,  # after the last row, reports are outdated
            tokens=max(self._tokens, self._tokens_before + stats.tokens),
            tokens_per_s=rate if rate is not None else tokens.total() / ran_s if tokens else None,
            tokens_per_forward=tokens.total() / forwards.total() if forwards.total() else None,
            threshold=self._threshold,
            eta_s=self.left * ran_s / done_in_run if done_in_run else None,
            note=note,
            workers=tuple(
                WorkerMetrics(
                    name=worker,
                    rows=self._rows[worker],
                    running=running.get(worker, 0),
                    tokens_per_s=rates.get(worker, tokens[worker] / ran_s),
                    tokens_per_forward=tokens[worker] / forwards[worker] if forwards[worker] else None,
                )
                for worker in sorted(running.keys() | tokens.keys())
            ),
        )

    def report(
        self,
        status: Status,
        *,
        model: str,
        notes: tuple[str, ...] = (),
        deadline: str = "",
        notice: str = "",
    ) -> JobReport:
        """Return the report of the job so far, over all of its runs."""
        history = self._output.history
        ledger = self._output.ledger
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
            notes=(*notes, *self._output.notes),
            notice=notice,
        )

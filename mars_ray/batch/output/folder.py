"""The output folder of a job.

In:    results, in any order, some of them twice.
Out:   `rows/part-*` with each answered row once, `errors.jsonl` (in a store `errors-NUMBER.jsonl`), `report.json`,
       `report.html`.
Never: loses what it took, whatever happens next; lets two jobs write.

A row is done once it stands in the ledger, or where the folder is in a store, in the log of the job. Records go from
there into shards of `ROWS_PER_SHARD`: written whole, and only then taken off the ledger. Killed in between, the same
records are written to the same name again. The errors file of a store bears the number of the event in the log that it
was written behind: it is never written over, for a driver that was given up might do that late.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Literal

from mars_ray.batch.output.history import History
from mars_ray.batch.output.job_log import Event, JobLog
from mars_ray.batch.output.ledger import Ledger
from mars_ray.batch.output.report import JobReport
from mars_ray.batch.output.report_page import job_page
from mars_ray.batch.output.shards import write_lines, write_parquet
from mars_ray.batch.rows.columns import Kind, table_of
from mars_ray.batch.rows.row_tables import RowResult
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_file

ROWS_PER_SHARD = 10_000
FileFormat = Literal["parquet", "jsonl"]


class OutputFolder:
    """A folder that was opened with `open_output`; one in a store has a log."""

    def __init__(self, folder: AnyPath, ledger: Ledger, history: History, log: JobLog | None = None) -> None:
        self.folder, self.ledger, self.history, self._log = folder, ledger, history, log
        self._rows = folder / "rows"
        self._had_errors = False
        self._kinds: dict[str, Kind | None] = {}
        self._format: FileFormat = "parquet"
        self._in_step = True
        """Whether ledger and log hold the same: a Ctrl-C may come between them. The log is right, then."""
        self._shards_there: set[str] = set()
        """Shards that need not be written again while the log is read."""

    def begin(self, format: FileFormat, kinds: dict[str, Kind | None]) -> None:
        """Count a run, whose shards have this format and, beside ours, columns of these kinds.

        Raises `RunError` when another driver begins at the same time.
        """
        if self._log is not None:
            self._log.append("begin", {"format": format, "kinds": kinds, "settings": self.ledger.settings()})
        self._format, self._kinds = format, kinds
        self.history.begin()

    def take(self, results: Sequence[RowResult], run_s: float) -> list[RowResult]:
        """Write results down, `run_s` seconds after the run began; return those that were new.

        Raises `RunError` when that is not possible; nothing of them counts then.
        """
        self._in_step = False
        fresh = self._note(results, run_s)
        if self._log is not None and fresh:
            self._log.add(fresh, run_s)
        self._in_step = True
        if self._log is not None and self.ledger.waiting >= ROWS_PER_SHARD:
            self._log.commit()  # what stands in a shard stands in the log
        self._shelve_full()
        return fresh

    def forget_errors(self) -> None:
        """Let the rows with errors be done again."""
        if self._log is not None:
            self._log.append("forget errors")
        self.ledger.forget_errors()

    def flush(self) -> None:
        """Put all records into files, so that what is done can be read."""
        number = None if self._log is None else self._log.append("flush" if self._in_step else "results")
        if not self._in_step:
            return
        self._shelve_all()
        if number is None:
            self._write_errors()
        elif self._had_errors:
            self._write_errors_behind(number)

    @property
    def errors_file(self) -> AnyPath | None:
        """The file of the rows with errors; None where there is none."""
        return max(self.folder.glob("errors*.jsonl"), key=str, default=None)

    def replay(self, events: Iterable[Event]) -> None:
        """Let the events of the log happen here, too. A shard that was not written before a kill is written."""
        self._shards_there = {path.name for path in self._rows.glob("part-*")}
        for event in events:
            for run_s, results in event.results:
                self._note(results, run_s)
                self._shelve_full()
            match event.kind:
                case "begin":
                    self.ledger.check_settings(event.details["settings"])
                    self._format, self._kinds = event.details["format"], event.details["kinds"]
                    self.history.begin()
                case "flush":
                    self._shelve_all()
                case "forget errors":
                    self.ledger.forget_errors()
        self._shards_there = set()

    def report(self, report: JobReport) -> None:
        """Write what the job did, for programs and for people; a driver whose job another has taken over is still."""
        if self._log is not None and self._log.failed:
            return
        write_file(self.folder / "report.json", [json.dumps(asdict(report), indent=2).encode() + b"\n"])
        write_file(self.folder / "report.html", [job_page(report).encode()])

    def _note(self, results: Sequence[RowResult], run_s: float) -> list[RowResult]:
        with self.ledger.transaction():
            fresh = self.ledger.add(results)
            self.history.add(fresh, run_s)
        self._had_errors = self._had_errors or any(each.error is not None for each in fresh)
        return fresh

    def _write_errors(self) -> None:
        if self.ledger.error_counts():
            write_lines(self.folder / "errors.jsonl", self.ledger.errors())
        else:
            (self.folder / "errors.jsonl").unlink(missing_ok=True)

    def _write_errors_behind(self, number: int) -> None:
        """Write what the log says up to its event `number`, if only that no error is left."""
        path = self.folder / f"errors-{number:010}.jsonl"
        write_lines(path, self.ledger.errors())
        for older in self.folder.glob("errors-*.jsonl"):
            if older.name < path.name:
                older.unlink(missing_ok=True)

    def _shelve_full(self) -> None:
        while self.ledger.waiting >= ROWS_PER_SHARD:
            self._shelve()

    def _shelve_all(self) -> None:
        while self.ledger.waiting:
            self._shelve()

    def _shelve(self) -> None:
        texts = self.ledger.records(ROWS_PER_SHARD)
        name = f"part-{self.ledger.shards:05d}.{self._format}"
        if name not in self._shards_there:
            if self._format == "parquet":
                write_parquet(self._rows / name, table_of(texts, self._kinds))
            else:
                write_lines(self._rows / name, texts)
        self.ledger.shelve(name, len(texts))

"""The output folder of a job.

In:    results, in any order, some of them twice.
Out:   `rows/part-*` with each answered row once, `errors.jsonl`, `report.json`, `report.html`.
Never: loses what it took, whatever happens next; lets two jobs write.

A row is done once it stands in the ledger. Records go from there into shards of `ROWS_PER_SHARD`: written, synced,
renamed, and only then taken off the ledger. Killed in between, the same records are written to the same name again.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from mars_ray.batch.output.history import History
from mars_ray.batch.output.ledger import Ledger
from mars_ray.batch.output.report import JobReport
from mars_ray.batch.output.report_page import page
from mars_ray.batch.output.shards import write_file, write_lines, write_parquet
from mars_ray.batch.rows.columns import Kind, table_of
from mars_ray.batch.rows.row_result import RowResult
from mars_ray.errors import OutputError

ROWS_PER_SHARD = 10_000
LEDGER = Path(".job") / "ledger.sqlite"
FileFormat = Literal["parquet", "jsonl"]


class OutputFolder:
    """A folder that was opened with `open_output`."""

    def __init__(self, folder: Path, ledger: Ledger, history: History) -> None:
        self.folder, self.ledger, self.history = folder, ledger, history
        self.rows = folder / "rows"
        self.errors = folder / "errors.jsonl"
        self.kinds: dict[str, Kind | None] = {}
        """Kinds of the input's columns, for parquet."""
        self.format: FileFormat = "parquet"

    def take(self, results: Sequence[RowResult], run_s: float) -> list[RowResult]:
        """Write results down, `run_s` seconds after the run began; return those that were new.

        Raises `RunError` when that is not possible; nothing of them counts then.
        """
        with self.ledger.transaction():
            fresh = self.ledger.add(results)
            self.history.add(fresh, run_s)
        while self.ledger.waiting >= ROWS_PER_SHARD:
            self._shelve()
        return fresh

    def flush(self) -> None:
        """Put all records into files, so that what is done can be read."""
        while self.ledger.waiting:
            self._shelve()
        if self.ledger.kinds():
            write_lines(self.errors, self.ledger.errors())
        else:
            self.errors.unlink(missing_ok=True)

    def report(self, report: JobReport) -> None:
        """Write what the job did, for programs and for people."""
        write_file(self.folder / "report.json", [json.dumps(asdict(report), indent=2).encode() + b"\n"])
        write_file(self.folder / "report.html", [page(report).encode()])

    def _shelve(self) -> None:
        texts = self.ledger.records(ROWS_PER_SHARD)
        name = f"part-{self.ledger.shards:05d}.{self.format}"
        if self.format == "parquet":
            write_parquet(self.rows / name, table_of(texts, self.kinds))
        else:
            write_lines(self.rows / name, texts)
        self.ledger.shelve(name, len(texts))


@contextmanager
def open_output(folder: Path, *, new: bool) -> Iterator[OutputFolder]:
    """Make or go on with an output folder; `new` puts an earlier one aside.

    Raises `OutputError` for a folder that holds something else, that another process works in, or that cannot be
    written to. A folder made here that stays without a row is removed.
    """
    hidden = folder / LEDGER.parent
    if new and hidden.exists():
        with _only_one(hidden):
            folder.rename(_aside(folder))
    if folder.exists() and not hidden.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} holds something that is no job. Give a new folder or empty this one.")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        (folder / "rows").mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"Cannot write to {folder}: {error.strerror}. Give another output folder.") from error
    with _only_one(hidden):
        ledger = Ledger(folder / LEDGER)
        try:
            yield OutputFolder(folder, ledger, History(ledger))
        finally:
            empty = not ledger.done
            ledger.close()
            if empty and made:
                shutil.rmtree(made[-1])


@contextmanager
def _only_one(hidden: Path) -> Iterator[None]:
    try:
        lock = (hidden / "lock").open("w")
    except OSError as error:
        raise OutputError(f"Cannot write to {hidden}: {error.strerror}. Give another output folder.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"Another process is working in {hidden.parent}. Wait for it, or give another output folder."
            ) from None
        yield


def _aside(folder: Path) -> Path:
    number = 1
    while (found := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    return found

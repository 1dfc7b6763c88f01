"""Output of a job, in a local folder or in a store such as `s3://bucket/answers`.

In:    the results of rows, in any order and possibly repeated.
Out:   shards `rows/part-*` that contain each answered row once, `errors.jsonl` (in a store: `errors-NUMBER-JOB.jsonl`),
       `report.json` and `report.html`.
Never: loses a result after `take` has returned, or lets two jobs write to the same folder.

A row is done once its result is in the ledger or, for an output in a store, in the log of the job. The records of
finished rows then move to shards of `ROWS_PER_SHARD` records. Records are removed from the ledger after their shard is
written; if the driver is killed in between, the same records are written to the same shard again. In a store, the name
of the errors file contains the number of the last event in the log, so an errors file is never overwritten, and a shard
is created only if it does not exist. Otherwise, a driver that has lost its job to a new driver could replace a file of
the new driver.

In a store, the names of shards and errors files also end in the id of the job, as `part-00000-1a2b3c4d.parquet` does. A
driver that is frozen while it writes may finish after `--new` has moved its job aside. The id shows that the file
belongs to no driver of the new job, so removing the file is always safe: the late driver removes it once it wakes up,
and the new job at the end of each run.

A local folder contains the ledger, and a lock keeps other drivers out. A store contains the log of the job. Each new
driver rebuilds the ledger from the log in a temporary folder, so a job in a store can be resumed from any machine.

All shards have the schema of `columns`, which depends on all input. If a run adds input that changes the schema, the
shards are rewritten before the first row of the run is answered. A run that was killed in between leaves shards of both
schemas, and the next run rewrites them again, which does not change the shards that are already rewritten. In a store,
the earlier run may have been frozen, and may write a shard late, after another run has changed the schema further. The
log shows which runs did not finish, so later runs check all shards again.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from upath import UPath

from mars_ray.batch.output.history import History
from mars_ray.batch.output.job_log import Event, JobLog
from mars_ray.batch.output.ledger import LEDGER, Ledger
from mars_ray.batch.output.report import JobReport
from mars_ray.batch.output.report_page import job_page
from mars_ray.batch.rows.columns import ColumnKinds, lines_of, notes_on, output_schema, table_of, united, widened
from mars_ray.batch.rows.row_tables import RowResult
from mars_ray.errors import OutputError, RunError, first_line
from mars_ray.progress import ProgressLine
from mars_ray.storage.driver_lease import DriverLease, locked
from mars_ray.storage.location import AnyPath, check_reachable, store_errors
from mars_ray.storage.whole_file import WRITE_ADVICE, write_file, write_lines, write_new_object

ROWS_PER_SHARD = 10_000
FileFormat = Literal["parquet", "jsonl"]
ADVICE = "Restore the file, or use --new to start a new job."
LOG = "log"
JOB_DIGITS = 8
"""Number of digits of a job's id in the names of its files."""
WRITTEN_STEM = re.compile(rf"(part-\d{{5,}}|errors-\d{{10,}})(-[0-9a-f]{{{JOB_DIGITS}}})?")
"""Stem of the file names that a job writes to a store; other files in the folder are the user's."""
P = TypeVar("P", Path, UPath)


class OutputFolder:
    """Output of a job, opened by `open_output`. An output in a store also has a log."""

    def __init__(self, folder: AnyPath, ledger: Ledger, log: JobLog | None = None) -> None:
        self.folder = folder
        self.ledger = ledger
        self.history = History(ledger)
        self._log = log
        self._rows = folder / "rows"
        self._had_errors = False
        self._kinds = ledger.kinds("input")
        self._format: FileFormat = "parquet"
        self._in_step = True
        """True if the ledger and the log agree. A Ctrl-C between the writes to the ledger and the log leaves this
        False; the log is then right."""
        self._unfinished_kinds: list[ColumnKinds] = []
        """Kinds for which earlier drivers began to rewrite shards and did not finish. A driver that was frozen may have
        written a shard late."""
        self._existing_shards: set[str] = set()
        """Shards that `replay` does not need to write again."""

    @property
    def _job(self) -> str:
        """End of the stem of file names, which tells the jobs of a store apart."""
        return "" if self._log is None else f"-{self._log.job[:JOB_DIGITS]}"

    def begin(self, format: FileFormat, kinds: ColumnKinds) -> None:
        """Begin a run whose shards have this format and whose input has values of these kinds.

        The shards of earlier runs are rewritten if the columns have changed. Raises `RunError` if writing fails or
        another driver begins at the same time.
        """
        kinds = united(self.ledger.kinds("input"), kinds)
        if self._log is not None:
            self._log.append("begin", {"format": format, "kinds": kinds, "settings": self.ledger.settings()})
        self._begin(format, kinds)
        if any(old != kinds for old in (self.ledger.kinds("shards"), *self._unfinished_kinds)):
            self._widen_shards()
            if self._log is not None:
                self._log.append("widened")
            self.ledger.set_kinds("shards", kinds)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each input column whose values are not written as they are."""
        return tuple(notes_on(self._kinds, jsonl=self._format == "jsonl"))

    def take(self, results: Sequence[RowResult], run_s: float) -> list[RowResult]:
        """Store results that arrived `run_s` seconds after the run began, and return those that are new.

        Raises `RunError` if writing fails, in which case no result is stored.
        """
        self._in_step = False
        fresh = self._note(results, run_s)
        if self._log is not None and fresh:
            self._log.add(fresh, run_s)
        self._in_step = True
        if self._log is not None and self.ledger.waiting >= ROWS_PER_SHARD:
            self._log.commit()  # a shard may hold only records that are in the log
        self._shelve_full()
        return fresh

    def forget_errors(self) -> None:
        """Remove the rows with errors from the ledger, so that they are answered again."""
        if self._log is not None:
            self._log.append("forget errors")
        self.ledger.forget_errors()

    def flush(self) -> None:
        """Write the records that are in no shard yet to shards, and write the errors file."""
        number = None
        if self._log is not None:
            number = self._log.append("flush" if self._in_step else "results")
            if not self._in_step:  # a stop in the middle of `take`: the ledger may hold results that the log lacks
                return
        self._shelve_all()
        if number is None:
            self._write_errors()
        else:
            if self._had_errors:
                self._write_numbered_errors(number)
            self._remove_late_files()

    @property
    def errors_file(self) -> AnyPath | None:
        """Path of the errors file, or None if there is no such file."""
        return max(self.folder.glob(f"errors*{self._job}.jsonl"), key=str, default=None)

    def check_driver(self) -> None:
        """Raise `RunError` if another driver has begun. On a disk, a lock keeps others out."""
        if self._log is not None:
            self._log.check_driver()

    def replay(self, events: Iterable[Event]) -> None:
        """Rebuild the ledger from the events of the log, and write the shards that a killed driver left unwritten."""
        self._existing_shards = {path.name for path in self._rows.glob("part-*")}
        for event in events:
            for run_s, results in event.results:
                self._note(results, run_s)
                self._shelve_full()
            match event.kind:
                case "begin":
                    self.ledger.check_settings(event.details["settings"])
                    if self.ledger.kinds("shards") != self._kinds:
                        self._unfinished_kinds.append(self._kinds)
                    self._begin(event.details["format"], event.details["kinds"])
                case "widened":
                    self.ledger.set_kinds("shards", self._kinds)
                case "flush":
                    self._shelve_all()
                case "forget errors":
                    self.ledger.forget_errors()
        self._existing_shards = set()

    def report(self, report: JobReport) -> None:
        """Write the report as JSON and HTML, unless another driver has taken over the job."""
        if self._log is not None and self._log.failed:
            return
        write_file(self.folder / "report.json", [json.dumps(asdict(report), indent=2).encode() + b"\n"])
        write_file(self.folder / "report.html", [job_page(report).encode()])

    def _begin(self, format: FileFormat, kinds: ColumnKinds) -> None:
        self._format = format
        self._kinds = kinds
        self.ledger.set_kinds("input", kinds)
        if not self.ledger.shards:
            self.ledger.set_kinds("shards", kinds)
        self.history.begin()

    def _widen_shards(self) -> None:
        names = self.ledger.shard_names()
        with ProgressLine("rewrite the output for new columns", total=len(names)) as progress:
            for number, name in enumerate(names, 1):
                content = rewritten_shard(self._rows / name, self._kinds)
                if content is not None:
                    self.check_driver()
                    write_file(self._rows / name, [content])
                    self._remove_if_late(self._rows / name)
                progress.update(number, {})

    def _note(self, results: Sequence[RowResult], run_s: float) -> list[RowResult]:
        with self.ledger.transaction():
            fresh = self.ledger.add(results)
            self.history.add(fresh, run_s)
        self._had_errors = self._had_errors or any(result.error is not None for result in fresh)
        return fresh

    def _write_errors(self) -> None:
        if self.ledger.error_counts():
            write_lines(self.folder / "errors.jsonl", self.ledger.errors())
        else:
            (self.folder / "errors.jsonl").unlink(missing_ok=True)

    def _write_numbered_errors(self, number: int) -> None:
        """Write the errors file for event `number` of the log, even if no errors remain, and remove older errors
        files."""
        path = self.folder / f"errors-{number:010}{self._job}.jsonl"
        write_lines(path, self.ledger.errors())
        self._remove_if_late(path)
        for older in self.folder.glob(f"errors-*{self._job}.jsonl"):
            if older.name < path.name:
                older.unlink(missing_ok=True)

    def _remove_if_late(self, path: AnyPath) -> None:
        """Remove a file that has just been written to a store if `--new` has moved this job aside meanwhile.

        Raises `RunError` then, so that this driver stops.
        """
        if self._log is not None and self._log.moved_aside():
            with store_errors(path, RunError, "Cannot remove", "Remove it by hand."):
                path.unlink(missing_ok=True)
            self.check_driver()

    def _remove_late_files(self) -> None:
        """Remove the files that drivers of earlier jobs wrote after `--new` had moved their jobs aside."""
        with store_errors(self.folder, RunError, "Cannot remove files of an earlier job from", WRITE_ADVICE):
            paths = [*self._rows.glob("part-*"), *self.folder.glob("errors-*.jsonl")]
            written = [path for path in paths if WRITTEN_STEM.fullmatch(path.stem)]
            late = [path for path in written if not path.stem.endswith(self._job)]
            if late:
                self.check_driver()  # so that no listed file is one of a newer job
            for path in late:
                path.unlink(missing_ok=True)

    def _shelve_full(self) -> None:
        while self.ledger.waiting >= ROWS_PER_SHARD:
            self._shelve()

    def _shelve_all(self) -> None:
        while self.ledger.waiting:
            self._shelve()
        if self.ledger.done and not self.ledger.shards and self._format == "parquet":
            self._shelve()  # no row has an answer; a table without rows can be read, a folder without files cannot

    def _shelve(self) -> None:
        texts = self.ledger.records(ROWS_PER_SHARD)
        name = f"part-{self.ledger.shards:05d}{self._job}.{self._format}"
        if name not in self._existing_shards:
            content = new_shard(texts, self._kinds, self._format)
            if self._log is None:
                write_file(self._rows / name, [content])
            else:
                if not write_new_object(self._rows / name, content):
                    self.check_driver()  # a new driver of this job has written the shard for other columns
                self._remove_if_late(self._rows / name)
        self.ledger.shelve(name, len(texts))


def open_output(folder: AnyPath, *, new: bool) -> AbstractContextManager[OutputFolder]:
    """Create or resume the output of a job in a folder. If `new`, an earlier output is renamed first.

    Entering the context raises `OutputError` if the folder contains files that do not belong to a job, is in use by
    another process or cannot be written, and `ConfigError` if the store cannot be reached. On exit, a new output
    without any finished row is removed.
    """
    if isinstance(folder, Path):
        return _open_local_output(folder.absolute(), new=new)
    return _open_stored_output(folder, new=new)


def is_job_output(folder: AnyPath) -> bool:
    """Return whether a folder is the output of a job: it has a ledger, a log, or what is left without them."""
    hidden = folder / LEDGER.parent
    return any((hidden / name).exists() for name in (LEDGER.name, LOG)) or all(
        (folder / name).exists() for name in ("report.json", "report.html", "rows")
    )


@contextmanager
def _open_local_output(folder: Path, *, new: bool) -> Iterator[OutputFolder]:
    hidden = folder / LEDGER.parent
    if new and hidden.exists():
        with locked(hidden / "lock", of=folder):
            folder.rename(_backup_name(folder))
    if folder.exists() and not hidden.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} has files that do not belong to a job. Give a new folder or empty this one.")
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        (folder / "rows").mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"Cannot write to {folder}: {error.strerror}. Give another output folder.") from error
    with locked(hidden / "lock", of=folder):
        ledger = Ledger(folder / LEDGER, of=folder, durable=True)
        try:
            yield OutputFolder(folder, ledger)
        finally:
            empty = not ledger.done
            ledger.close()
            if empty and created:
                shutil.rmtree(folder)
                with suppress(OSError):  # another job has its output below the same folder
                    for parent in created[1:]:
                        parent.rmdir()


def _backup_name(folder: P) -> P:
    number = 1
    while (backup := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    return backup


@contextmanager
def _open_stored_output(folder: UPath, *, new: bool) -> Iterator[OutputFolder]:
    check_reachable(folder)
    hidden = folder / LEDGER.parent
    with (
        DriverLease(hidden / "driver.json", of=folder).held(),
        TemporaryDirectory() as temporary,
        closing(Ledger(Path(temporary) / LEDGER.name, of=folder, durable=False)) as ledger,
    ):
        with store_errors(folder, OutputError, "Cannot use", "Give another output."):
            if not (hidden / LOG).exists() and _names(folder):
                raise OutputError(
                    f"{folder} has files that do not belong to a job. Give a new folder or empty this one."
                )
            if new:
                _rename_stored(folder)
        log = JobLog(hidden / LOG)
        output = OutputFolder(folder, ledger, log)
        output.replay(log.read())
        is_new = not log.begun
        with log.kept():
            yield output
            empty = is_new and not ledger.done and not log.failed
            if empty:
                log.check_driver()
        if empty:
            with store_errors(folder, OutputError, "Cannot remove", "Remove it by hand."):
                _remove_stored(folder, _names(folder))


def _names(folder: UPath) -> list[str]:
    """Return the names of the objects in a folder, except that of the driver's lease."""
    return [name for name in folder.fs.find(folder.path) if not name.endswith("/driver.json")]


def _rename_stored(folder: UPath) -> None:
    """Rename a folder in a store: copy all objects, then remove the originals."""
    backup = _backup_name(folder)
    fs = folder.fs
    names = _names(folder)
    for name in names:
        fs.copy(name, backup.path + name.removeprefix(folder.path))
    _remove_stored(folder, names)


def _remove_stored(folder: UPath, names: Sequence[str]) -> None:
    """Remove objects of a job, the log last and from its end, so that an interrupted removal can be repeated."""
    for name in sorted(names, key=lambda name: (f"/{LEDGER.parent}/" not in name, name), reverse=True):
        with suppress(FileNotFoundError):
            folder.fs.rm(name)


def new_shard(texts: Sequence[str], kinds: ColumnKinds, format: FileFormat) -> bytes:
    """Return the content of a shard with these records, given as JSON."""
    return _parquet(table_of(texts, kinds)) if format == "parquet" else _jsonl(texts, kinds)


def rewritten_shard(path: AnyPath, kinds: ColumnKinds) -> bytes | None:
    """Return the content of a shard as `new_shard` would make it now that its job has more kinds of values.

    Returns None if the shard is up to date, or if a user has removed it. Raises `RunError` if the shard is damaged.
    """
    with store_errors(path, RunError, "Cannot read", ADVICE):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        new = _rewritten(content, kinds, parquet=path.name.endswith(".parquet"))
    except (OSError, ValueError) as error:  # of Arrow, JSON and UTF-8
        raise RunError(f"{path} is damaged: {first_line(error)}. {ADVICE}") from error
    return None if new == content else new


def _rewritten(content: bytes, kinds: ColumnKinds, *, parquet: bool) -> bytes:
    if not parquet:
        return _jsonl(content.decode().split("\n")[:-1], kinds)
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        table = file.read()
    return content if table.schema.equals(output_schema(kinds)) else _parquet(widened(table, kinds))


def _parquet(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, table.schema) as writer:
        if len(table):  # Hugging Face's datasets cannot read a row group without rows
            writer.write_table(table)
    return bytes(buffer.getvalue())


def _jsonl(texts: Sequence[str], kinds: ColumnKinds) -> bytes:
    return b"".join(line.encode() + b"\n" for line in lines_of(texts, kinds))

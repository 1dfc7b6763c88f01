"""Log of a job in a store: numbered objects, appended by compare-and-swap.

In:    the events of a job: a driver begins, shards are widened, results arrive, records are written to files, errors
       are forgotten.
Out:   the same events in the same order, for the next driver of the job, on any machine.
Never: appends an event from one driver after another driver has begun.

The log is separate from the shards, because a shard per second would be too many small files, and one per ten thousand
rows would lose hours of work.

An object is created only if it does not exist, so if two drivers append an event with the same number, one of them
fails. HDFS and S3 servers that ignore `If-None-Match` have no conditional writes. On them, two drivers that write
within milliseconds of each other may both succeed, and only the lease from `driver_lease` keeps the drivers apart.
"""

import json
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from upath import UPath

from mars_ray.batch.rows.row_tables import RESULT_SCHEMA, RowResult, from_table, to_table
from mars_ray.errors import OutputError, RunError
from mars_ray.storage.location import store_errors
from mars_ray.storage.whole_file import create_object

COMMIT_S = 1.0
"""Seconds between writes of results to the log. If the driver dies, the results of up to this many seconds are lost."""
RESUME_ADVICE = "Finished rows are kept; give the same command again, without --new."
READ_AT_ONCE = 256
"""Number of objects to read per request."""
EventKind = Literal["begin", "widened", "results", "flush", "forget errors"]
NEW_RESULTS = ("run_s", pa.float64())
DETAILS = b"mars_ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a job, stored as one object of the log."""

    kind: EventKind
    driver: str
    """Unique id of the driver that wrote the event."""
    details: dict[str, Any] = field(default_factory=dict)
    """Output format, input columns and settings of the job, if this is a `begin` event; otherwise empty."""
    results: Sequence[tuple[float, list[RowResult]]] = ()
    """Results that arrived before the event, grouped by arrival time in seconds since the start of the run."""

    def to_bytes(self) -> pa.Buffer:
        """Return the bytes that are stored for the event."""
        table = pa.concat_tables([RESULT_SCHEMA.empty_table(), *(to_table(results) for _, results in self.results)])
        seconds = [run_s for run_s, results in self.results for _ in results]
        table = table.append_column(NEW_RESULTS[0], pa.array(seconds, NEW_RESULTS[1]))
        fields = {"kind": self.kind, "driver": self.driver, "details": self.details}
        buffer = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata({DETAILS: json.dumps(fields)}), buffer, compression="zstd")
        return buffer.getvalue()

    @staticmethod
    def from_bytes(content: bytes) -> "Event":
        """Return the event in an object; the inverse of `to_bytes`."""
        table = pq.read_table(pa.BufferReader(content))
        pairs = zip(table[NEW_RESULTS[0]].to_pylist(), from_table(table), strict=True)
        results = [
            (run_s, [result for _, result in group]) for run_s, group in groupby(pairs, key=lambda pair: pair[0])
        ]
        return Event(**json.loads(table.schema.metadata[DETAILS]), results=results)


class JobLog:
    """Log of a job in `folder`. Call `read` first, then write inside `with log.kept()`."""

    def __init__(self, folder: UPath) -> None:
        self._folder = folder
        self.driver = uuid.uuid4().hex
        self.job = self.driver
        """Unique id of the job: the driver of the first event, which this driver writes if there is no event yet."""
        self._next = 1
        self._last_driver = ""
        """Driver of the last event, which is in the object before `_next`."""
        self._waiting: list[tuple[float, list[RowResult]]] = []
        self._failure: BaseException | None = None
        # A separate thread writes the events one by one, so a Ctrl-C in the main thread interrupts no write.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="job-log")
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def read(self) -> Iterator[Event]:
        """Yield all events. Raises `OutputError` if events cannot be read or are missing."""
        with store_errors(self._folder, OutputError, "Cannot read the job in", "Give another output."):
            fs = self._folder.fs
            names = sorted(fs.find(self._folder.path))
            if names != [self._name(number).path for number in range(1, len(names) + 1)]:
                raise OutputError(f"some objects in {self._folder} are missing. Give another output.")
            for start in range(0, len(names), READ_AT_ONCE):
                contents = fs.cat(names[start : start + READ_AT_ONCE])
                for name in names[start : start + READ_AT_ONCE]:
                    event = Event.from_bytes(contents[name])
                    if not self.begun:
                        self.job = event.driver
                    yield event
                    self._next += 1
                    self._last_driver = event.driver

    @property
    def begun(self) -> bool:
        """Whether the log has an event."""
        return self._next > 1

    @property
    def failed(self) -> bool:
        """True after a failed write, for example because another driver has begun."""
        return self._failure is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While the `with` block runs, write the added results every `COMMIT_S` seconds.

        However the block ends, the last results are written. Raises `RunError` if this fails or another driver has
        begun, but not if an earlier write failed.
        """
        keeper = threading.Thread(target=self._keep, name="job-log-keeper", daemon=True)
        keeper.start()
        with self._writer:
            try:
                yield
            finally:
                self._closing.set()
                keeper.join()
                if not self.failed:
                    self.commit()

    def add(self, results: list[RowResult], run_s: float) -> None:
        """Add results, which are written within `COMMIT_S` seconds. Raises `RunError` if an earlier write failed."""
        self._raise_failure()
        with self._lock:
            self._waiting.append((run_s, results))

    def commit(self) -> None:
        """Write the added results now. Raises `RunError` if writing fails or another driver has begun."""
        self.append("results")

    def append(self, kind: EventKind, details: dict[str, Any] | None = None) -> int:
        """Write the added results and an event, and return the event's number. Raises the same errors as `commit`."""
        written: Future[int] = self._writer.submit(self._append, kind, details or {})
        return written.result()

    def check_driver(self) -> None:
        """Raise `RunError` if another driver has begun or an earlier write failed."""
        self._writer.submit(self._check_driver).result()

    def moved_aside(self) -> bool:
        """Return whether `--new` has moved this job aside. Raises `RunError` if the log cannot be read."""
        with store_errors(self._folder, RunError, "Cannot read the job in", RESUME_ADVICE):
            return not _wrote(self.job, self._name(1))

    def _append(self, kind: EventKind, details: dict[str, Any]) -> int:
        self._raise_failure()
        with self._lock:
            results = self._waiting
            self._waiting = []
        if kind == "results" and not results:
            return self._next - 1
        event = Event(kind=kind, driver=self.driver, details=details, results=results)
        path = self._name(self._next)
        try:
            with store_errors(self._folder, RunError, "Cannot write to", RESUME_ADVICE):
                self._check_last()
                if not create_object(path, event.to_bytes().to_pybytes()):
                    self._check_driver_of(path, self.driver)
        except BaseException as error:
            self._failure = error
            raise
        self._next += 1
        self._last_driver = self.driver
        return self._next - 1

    def _check_driver(self) -> None:
        self._raise_failure()
        path = self._name(self._next)
        with store_errors(self._folder, RunError, "Cannot read the job in", RESUME_ADVICE):
            self._folder.fs.invalidate_cache()
            self._check_last()
            if path.exists():
                self._check_driver_of(path, self.driver)

    def _check_last(self) -> None:
        """Raise `RunError` if the last event is gone or another, because a new job has the folder."""
        if self.begun:
            self._check_driver_of(self._name(self._next - 1), self._last_driver)

    def _check_driver_of(self, path: UPath, driver: str) -> None:
        """Raise `RunError` unless `driver` wrote the object. One of this driver may exist already, from an earlier
        request whose response was lost."""
        if not _wrote(driver, path):
            self._failure = RunError(
                f"Another driver has taken over the job in {self._folder.parent.parent}. "
                "This driver stops; its finished rows are kept."
            )
            raise self._failure

    def _keep(self) -> None:
        while not self._closing.wait(COMMIT_S):
            with suppress(Exception):  # the next call of `add` or `append` raises the error
                self.commit()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _name(self, number: int) -> UPath:
        return self._folder / f"{number:010}.parquet"


def _wrote(driver: str, path: UPath) -> bool:
    """Return whether `driver` wrote the event in an object; False if there is no object."""
    try:
        return Event.from_bytes(path.read_bytes()).driver == driver
    except FileNotFoundError:
        return False

"""The log of a job in a store: numbered objects, each created only where there is none.

In:    what happens to a job: a driver begins, results, records go into files, errors are forgotten.
Out:   the same events in the same order, for whoever goes on with the job, on whatever machine.
Never: takes an event of a driver once another one has begun.

An event counts once its object is there. Objects are created, never written over, so of two drivers that write the
next one a single one succeeds, and the other knows. Where a store has no conditional writes (HDFS, and what takes S3's
requests without heeding `If-None-Match`), two drivers that write within the same milliseconds may both believe to have
written; there only the lease of `driver_lease` keeps them apart.
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
"""Results wait at most so long; a driver that is gone for good takes no more than these with it."""
READ_AT_ONCE = 256
"""Objects that are read together when a job goes on."""
EventKind = Literal["begin", "results", "flush", "forget errors"]
NEW_RESULTS = ("run_s", pa.float64())
DETAILS = b"mars_ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One object of the log."""

    kind: EventKind
    driver: str
    """Who wrote it: a name no other start of a driver has."""
    details: dict[str, Any] = field(default_factory=dict)
    """What the job began with, of `begin`."""
    results: Sequence[tuple[float, list[RowResult]]] = ()
    """Results and how many seconds after the start of the run they came; they precede what `kind` says."""

    def to_bytes(self) -> pa.Buffer:
        """Return it as the content of an object, which `from_bytes` reads."""
        table = pa.concat_tables([RESULT_SCHEMA.empty_table(), *(to_table(results) for _, results in self.results)])
        seconds = [run_s for run_s, results in self.results for _ in results]
        table = table.append_column(NEW_RESULTS[0], pa.array(seconds, NEW_RESULTS[1]))
        said = {"kind": self.kind, "driver": self.driver, "details": self.details}
        buffer = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata({DETAILS: json.dumps(said)}), buffer, compression="zstd")
        return buffer.getvalue()

    @staticmethod
    def from_bytes(content: bytes) -> "Event":
        """Undo `to_bytes`."""
        table = pq.read_table(pa.BufferReader(content))
        pairs = zip(table[NEW_RESULTS[0]].to_pylist(), from_table(table), strict=True)
        results = [(run_s, [each for _, each in group]) for run_s, group in groupby(pairs, key=lambda pair: pair[0])]
        return Event(**json.loads(table.schema.metadata[DETAILS]), results=results)


class JobLog:
    """The log in `folder`, read with `read` and then written by this driver within `kept`."""

    def __init__(self, folder: UPath) -> None:
        self._folder, self.driver = folder, uuid.uuid4().hex
        self._next = 1
        self._waiting: list[tuple[float, list[RowResult]]] = []
        self._failure: BaseException | None = None
        # One writes, in turn: a Ctrl-C that ends a wait for it leaves nothing half done.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="job-log")
        self._lock, self._closing = threading.Lock(), threading.Event()

    def read(self) -> Iterator[Event]:
        """Yield the events so far. Raises `OutputError` when they cannot be read, or some are missing."""
        with store_errors(self._folder, OutputError, "Cannot read the job in", "Give another output."):
            fs = self._folder.fs
            names = sorted(fs.find(self._folder.path))
            if names != [self._name(number).path for number in range(1, len(names) + 1)]:
                raise OutputError(f"{self._folder} lacks some of its objects. Give another output.")
            for start in range(0, len(names), READ_AT_ONCE):
                found = fs.cat(names[start : start + READ_AT_ONCE])
                for name in names[start : start + READ_AT_ONCE]:
                    yield Event.from_bytes(found[name])
                    self._next += 1

    @property
    def failed(self) -> bool:
        """Whether nothing can be written any more, such as because another driver has begun."""
        return self._failure is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within the block, write what was added every `COMMIT_S`."""
        keeper = threading.Thread(target=self._keep, name="job-log-keeper", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            self._closing.set()
            keeper.join()
            self._writer.shutdown()

    def add(self, results: list[RowResult], run_s: float) -> None:
        """Take results, to be written within `COMMIT_S`. Raises `RunError` once nothing can be written any more."""
        self._raise_failure()
        with self._lock:
            self._waiting.append((run_s, results))

    def commit(self) -> None:
        """Write what was added. Raises `RunError` when that is not possible, or another driver has begun."""
        with self._lock:
            idle = not self._waiting
        if not idle:
            self.append("results")
        self._raise_failure()

    def append(self, kind: EventKind, details: dict[str, Any] | None = None) -> int:
        """Write an event, behind what was added before, and return how many the log has then; see `commit`."""
        written: Future[int] = self._writer.submit(self._append, kind, details or {})
        return written.result()

    def remove(self) -> None:
        """Remove the log, with which the job is gone."""
        self._folder.fs.rm(self._folder.path, recursive=True)

    def _append(self, kind: EventKind, details: dict[str, Any]) -> int:
        self._raise_failure()
        with self._lock:
            results, self._waiting = self._waiting, []
        if kind == "results" and not results:
            return self._next - 1
        event = Event(kind=kind, driver=self.driver, details=details, results=results)
        place = self._name(self._next)
        try:
            advice = "What was done is kept; give the same command again."
            with store_errors(self._folder, RunError, "Cannot write any more to", advice):
                if not create_object(place, event.to_bytes().to_pybytes()):
                    self._check_own(place)
        except BaseException as error:
            self._failure = error
            raise
        self._next += 1
        return self._next - 1

    def _check_own(self, place: UPath) -> None:
        """Pass where the object is this driver's own: its client asked again after an answer that was lost."""
        if Event.from_bytes(place.read_bytes()).driver != self.driver:
            raise RunError(
                f"Another driver has gone on with the job in {self._folder.parent.parent}. "
                "This one stops; what it had done is kept."
            )

    def _keep(self) -> None:
        while not self._closing.wait(COMMIT_S):
            with suppress(Exception):  # the next `add` or `append` raises it
                self.commit()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _name(self, number: int) -> UPath:
        return self._folder / f"{number:010}.parquet"

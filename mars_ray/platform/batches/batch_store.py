"""Batches of callers in a folder or an object store.

In:    requests of owners; the state and the figures that the runner writes.
Out:   OpenAI's batch objects; the figures, for the metrics of all gateways.
Never: shows a batch to another owner, or lets two processes write the same object.

A batch is a folder. The gateway that takes a request creates `batch.json` and, to cancel, `cancel.json`; the driver of
the batch alone writes `state.json` and the folder `job`. A batch has an object among the unfinished ones from before it
exists until its end is written, so a new driver finds all batches that have not ended.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from openai.types.batch import Batch
from openai.types.batch_error import BatchError
from openai.types.batch_usage import BatchUsage
from pydantic import BaseModel, ValidationError

from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.errors import BatchEndedError, DataError, QuotaError, RequestError, StoredNotFoundError
from mars_ray.platform.batches.file_store import KEPT_S, FileStore
from mars_ray.platform.batches.protocol import BatchRequest, ObjectPage, StorageLimits, window_seconds
from mars_ray.platform.batches.storage_paths import (
    BATCH,
    BatchFolders,
    created_s,
    is_file,
    is_id,
    names_in,
    new_id,
    owner_name,
    owners_in,
    page_of,
    read_json,
    remove,
    write_json,
)
from mars_ray.storage.location import AnyPath

log = logging.getLogger(__name__)

REQUEST, CANCEL, STATE, JOB, FIGURES = "batch.json", "cancel.json", "state.json", "job", "figures.json"
STALE_S = 120.0
"""Age in seconds at which figures are no longer shown, because their runner has ended."""
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
"""Statuses after which nothing changes."""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class StoredBatch(BaseModel, extra="forbid", frozen=True):
    """A batch as its owner requested it."""

    id: str
    owner: str
    """Account that owns the batch; empty without keys."""
    key: str
    """Name of the key that created the batch, for usage and limits."""
    created_at: int
    request: BatchRequest

    @property
    def expires_at(self) -> int:
        """Unix time of the deadline, in seconds."""
        return self.created_at + window_seconds(self.request.completion_window)


class BatchState(BaseModel, extra="forbid", frozen=True):
    """Progress of a batch, as its driver writes it."""

    status: Status = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: BatchUsage | None = None
    """Tokens of the rows with an answer; None until their results are stored."""
    model: str | None = None
    """Model of the first row."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[BatchError, ...] = ()

    @property
    def rows_left(self) -> int:
        """Number of rows that are not done."""
        return max(0, self.total - self.completed - self.failed)


class BatchFigures(BaseModel, extra="forbid", frozen=True):
    """Figures of all batches of an endpoint at one moment. The counts of what has ended begin at 0 when the runner
    starts. Only the runner lists the storage, so that each figure exists once in an endpoint."""

    unix_s: float
    """Unix time of the publication, in seconds."""
    unfinished: dict[str, int] = {}
    """Batches that have not ended, by status, or `waiting` if no driver works on them."""
    rows_left: int = 0
    """Rows of unfinished batches that are not done, without batches whose file has not been checked yet."""
    deadline_unix_s: float | None = None
    """Unix time of the earliest deadline of an unfinished batch, in seconds."""
    ended: dict[str, int] = {}
    """Batches that ended since the runner started, by status."""
    rows: dict[str, int] = {}
    """Rows that were done since the runner started, by outcome: `completed` or `failed`."""
    file_bytes: int = 0
    """Bytes of the files of all owners, results included."""

    def are_stale(self, now_s: float) -> bool:
        """Return whether the figures are too old to show at the Unix time `now_s`."""
        return now_s - self.unix_s >= STALE_S


class BatchStore:
    """The batches of all owners. Methods block, and raise `UnavailableError` if the storage does not answer.

    `clock` returns the Unix time in seconds.
    """

    def __init__(
        self,
        folders: BatchFolders,
        files: FileStore,
        limits: StorageLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folders = folders
        self._files = files
        self._limits = limits
        self._clock = clock
        self._damaged = set[str]()
        """Paths of damaged requests that are in the log."""

    def create(self, owner: str, key: str, request: BatchRequest) -> Batch:
        """Store a new batch, created with the key of this name.

        Raises `StoredNotFoundError` for an unknown file, `QuotaError` for too many batches, and `RequestError` for a
        file that expires too early.
        """
        file = self._files.get(owner, request.input_file_id)
        if file.purpose != "batch":
            raise StoredNotFoundError(f"the file {file.id!r} was not uploaded with the purpose batch.")
        now_s = self._clock()
        left_s = (file.expires_at or 0) - int(now_s)
        if left_s < window_seconds(request.completion_window):
            raise RequestError(
                f"the file {file.id!r} expires in {left_s} s, before the completion_window {request.completion_window} "
                "ends. Choose a shorter window, or upload the file again with a later expires_after."
            )
        unfinished = self._folders.unfinished(owner)
        if len(names_in(unfinished)) >= (limit := self._limits.unfinished_batches):
            raise QuotaError(
                f"{limit} batches have not ended, which is the maximum. Wait until one ends, or cancel one."
            )
        stored = StoredBatch(id=new_id(BATCH, now_s), owner=owner, key=key, created_at=int(now_s), request=request)
        write_json(unfinished / stored.id, {"owner": owner})
        write_json(self.folder(stored) / REQUEST, stored.model_dump(mode="json"))
        return _object(stored, BatchState(), None)

    def get(self, owner: str, id: str) -> Batch:
        """Return a batch. Raises `StoredNotFoundError`."""
        batch = self._read(owner, id) if is_id(id, BATCH) else None
        if batch is None:
            raise StoredNotFoundError(f"no batch with id {id[:NAME_CHARS]!r} exists.")
        return batch

    def cancel(self, owner: str, id: str) -> Batch:
        """Ask the driver of a batch to stop. Raises `StoredNotFoundError`, and `BatchEndedError` if it has ended."""
        batch = self.get(owner, id)
        if batch.status in ENDED:
            raise BatchEndedError(
                f"the batch {id!r} is {batch.status}; only a batch that has not ended can be cancelled."
            )
        if batch.status != "cancelling":
            write_json(self._folders.batches(owner) / id / CANCEL, {"cancelling_at": int(self._clock())})
        return self.get(owner, id)

    def page(self, owner: str, *, after: str | None, limit: int) -> ObjectPage[Batch]:
        """Return up to `limit` batches that were created before the batch `after`, newest first."""
        names = names_in(self._folders.batches(owner))
        return page_of(names, lambda id: self._undamaged(owner, id), after=after, limit=limit, order="desc")

    def uses(self, owner: str, file_id: str) -> str | None:
        """Return the id of a batch that has not ended and reads a file, or None."""
        for id in names_in(self._folders.unfinished(owner)):
            stored = self._stored(owner_name(owner), id)
            if stored is None or stored.request.input_file_id != file_id:
                continue
            batch = self._undamaged(owner, id)
            if batch is None or batch.status not in ENDED:  # a damaged state may be that of a batch that goes on
                return id
        return None

    def unfinished(self) -> list[StoredBatch]:
        """Return the batches of all owners that have not ended, earliest deadline first. Damaged ones are left out."""
        batches: list[StoredBatch] = []
        all_owners = self._folders.unfinished_of_all
        for owner in owners_in(all_owners):
            for id in names_in(all_owners / owner):
                if is_id(id, BATCH) and (batch := self._stored(owner, id)) is not None:
                    batches.append(batch)
        return sorted(batches, key=lambda batch: batch.expires_at)

    def folder(self, batch: StoredBatch) -> AnyPath:
        """Return the folder of a batch."""
        return self._folders.batches(batch.owner) / batch.id

    def state(self, batch: StoredBatch) -> BatchState:
        """Return the state that a driver wrote last. Raises `DataError` if it is damaged."""
        try:
            return BatchState.model_validate(read_json(self.folder(batch) / STATE) or {})
        except ValidationError as error:
            raise DataError(f"the state of batch {batch.id} is damaged: {error.errors()[0]['msg']}.") from error

    def is_cancelled(self, batch: StoredBatch) -> bool:
        """Return whether the owner has asked to cancel."""
        return is_file(self.folder(batch) / CANCEL)

    def write_state(self, batch: StoredBatch, state: BatchState) -> None:
        """Write the state of a batch. Only its driver may call this."""
        write_json(self.folder(batch) / STATE, state.model_dump(mode="json"))

    def forget(self, batch: StoredBatch) -> None:
        """Remove a batch that has ended from the unfinished ones, and the work files of its driver."""
        remove(self._folders.unfinished(batch.owner) / batch.id)
        remove(self.folder(batch) / JOB)

    def write_figures(self, figures: BatchFigures) -> None:
        """Replace the figures. Only the runner may call this."""
        write_json(self._folders.root / FIGURES, figures.model_dump(mode="json"))

    def figures(self, now_s: float) -> BatchFigures | None:
        """Return the figures; None if no runner has published any in the `STALE_S` seconds before the Unix time
        `now_s`, or if they are damaged."""
        try:
            figures = BatchFigures.model_validate(read_json(self._folders.root / FIGURES))
        except (DataError, ValidationError):  # the runner replaces them within seconds
            return None
        return None if figures.are_stale(now_s) else figures

    def sweep(self) -> None:
        """Remove batches that ended long ago, and the traces of requests that were cut off before they were stored."""
        for owner in owners_in(self._folders.root / "jobs"):
            folder = self._folders.root / "jobs" / owner
            open_ids = set(names_in(self._folders.unfinished_of_all / owner))
            for id in names_in(folder):
                if is_id(id, BATCH) and id not in open_ids and created_s(id) + 2 * KEPT_S <= self._clock():
                    remove(folder / id)
        for owner in owners_in(self._folders.unfinished_of_all):
            for id in names_in(self._folders.unfinished_of_all / owner):
                stored = is_file(self._folders.root / "jobs" / owner / id / REQUEST)
                if is_id(id, BATCH) and not stored and created_s(id) + 3600 <= self._clock():
                    remove(self._folders.unfinished_of_all / owner / id)

    def _stored(self, owner_folder: str, id: str) -> StoredBatch | None:
        """Return a batch; None if it does not exist, or is damaged, of which the log has a line."""
        path = self._folders.root / "jobs" / owner_folder / id / REQUEST
        try:
            fields = read_json(path)
            stored = None if fields is None else StoredBatch.model_validate(fields)
            if stored and (stored.id, owner_name(stored.owner)) != (id, owner_folder):
                raise DataError("it belongs to another batch or account.")
        except (DataError, ValidationError) as error:
            self._leave_out(path, error)
            return None
        return stored

    def _undamaged(self, owner: str, id: str) -> Batch | None:
        """Return a batch; None if it does not exist or a file of it is damaged, of which the log has a line."""
        try:
            return self._read(owner, id)
        except DataError as error:
            self._leave_out(self._folders.batches(owner) / id, error)
            return None

    def _leave_out(self, path: AnyPath, error: Exception) -> None:
        if str(path) not in self._damaged:
            self._damaged.add(str(path))
            log.error("the batch %s is left out, because it is damaged: %s", path, " ".join(str(error).split()))

    def _read(self, owner: str, id: str) -> Batch | None:
        stored = self._stored(owner_name(owner), id)
        if stored is None:
            return None
        cancel = read_json(self.folder(stored) / CANCEL)
        try:
            cancelling_at = None if cancel is None else int(cancel["cancelling_at"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the cancellation of batch {stored.id} is damaged.") from error
        return _object(stored, self.state(stored), cancelling_at)


def _object(stored: StoredBatch, state: BatchState, cancelling_at: int | None) -> Batch:
    counts = {"total", "completed", "failed"}
    cancelling = cancelling_at is not None and state.status not in ENDED
    fields = stored.request.model_dump(exclude={"output_expires_after"}) | state.model_dump(exclude={*counts, "errors"})
    fields |= {
        "id": stored.id,
        "object": "batch",
        "status": "cancelling" if cancelling else state.status,
        "created_at": stored.created_at,
        "expires_at": stored.expires_at,
        "cancelling_at": cancelling_at,
        "errors": {"object": "list", "data": state.errors} if state.errors else None,
        "request_counts": state.model_dump(include=counts),
    }
    return Batch.model_validate(fields)


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of files and batches of an endpoint."""

    files: FileStore
    batches: BatchStore

    @classmethod
    def below(cls, storage: str | None, limits: StorageLimits) -> "Stores | None":
        """Return the stores in the storage of an endpoint; None without storage. Raises `ConfigError` for a bad URL."""
        if storage is None:
            return None
        folders = BatchFolders.below(storage)
        files = FileStore(folders, limits)
        return cls(files, BatchStore(folders, files, limits))

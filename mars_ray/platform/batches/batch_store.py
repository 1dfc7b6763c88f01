"""Batches of callers in a folder or an object store.

In:    requests of owners; the state that the runner writes.
Out:   OpenAI's batch objects.
Never: shows a batch to another owner, or lets two processes write the same object.

A batch is a folder. The gateway that takes a request creates `batch.json` and, to cancel, `cancel.json`; the driver of
the batch alone writes `state.json` and the folder `job`. A batch has an object among the unfinished ones from before it
exists until its end is written, so a new driver finds all batches that have not ended.
"""

import logging
import time
from collections.abc import Callable
from typing import Literal

from openai.types.batch import Batch, Errors
from openai.types.batch_error import BatchError
from openai.types.batch_request_counts import BatchRequestCounts
from openai.types.batch_usage import BatchUsage
from pydantic import BaseModel, ConfigDict, ValidationError

from mars_ray.errors import BatchEndedError, DataError, QuotaError, RequestError, StoredNotFoundError
from mars_ray.openai_api.batches_protocol import BatchRequest, window_seconds
from mars_ray.openai_api.storage_limits import StorageLimits
from mars_ray.platform.batches.file_store import ID_CHARS, KEPT_S, FileStore, ordered
from mars_ray.platform.batches.storage_paths import (
    BATCH,
    BatchFolders,
    is_file,
    is_id,
    names_in,
    new_id,
    owner_name,
    owners_in,
    read_json,
    remove,
    write_json,
)
from mars_ray.storage.location import AnyPath

log = logging.getLogger(__name__)

REQUEST, CANCEL, STATE, JOB = "batch.json", "cancel.json", "state.json", "job"
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
"""Statuses after which nothing changes."""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class StoredBatch(BaseModel):
    """A batch as its owner requested it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


class BatchState(BaseModel):
    """Progress of a batch, as its driver writes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
            raise StoredNotFoundError(f"no batch with id {id[:ID_CHARS]!r} exists.")
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

    def page(self, owner: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Return up to `limit` batches that were created before the batch `after`, newest first, and whether more
        follow."""
        batches: list[Batch] = []
        for name in ordered(names_in(self._folders.batches(owner)), after, "desc"):
            batch = self._read(owner, name)
            if batch is not None:
                if len(batches) == limit:
                    return batches, True
                batches.append(batch)
        return batches, False

    def uses(self, owner: str, file_id: str) -> str | None:
        """Return the id of a batch that has not ended and reads a file, or None."""
        for id in names_in(self._folders.unfinished(owner)):
            batch = self._read(owner, id)
            if batch is not None and batch.input_file_id == file_id and batch.status not in ENDED:
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
        """Return the state that a driver wrote last."""
        return BatchState.model_validate(read_json(self.folder(batch) / STATE) or {})

    def is_cancelled(self, batch: StoredBatch) -> bool:
        """Return whether the owner has asked to cancel."""
        return read_json(self.folder(batch) / CANCEL) is not None

    def write_state(self, batch: StoredBatch, state: BatchState) -> None:
        """Write the state of a batch. Only its driver may call this."""
        write_json(self.folder(batch) / STATE, state.model_dump(mode="json"))

    def forget(self, batch: StoredBatch) -> None:
        """Remove a batch that has ended from the unfinished ones, and the work files of its driver."""
        remove(self._folders.unfinished(batch.owner) / batch.id)
        remove(self.folder(batch) / JOB)

    def sweep(self) -> None:
        """Remove batches that ended long ago, and the traces of requests that were cut off before they were stored."""
        for owner in owners_in(self._folders.root / "jobs"):
            folder = self._folders.root / "jobs" / owner
            open_ids = set(names_in(self._folders.unfinished_of_all / owner))
            for id in names_in(folder):
                if id not in open_ids and self._created_s(id) + 2 * KEPT_S <= self._clock():
                    remove(folder / id)
        for owner in owners_in(self._folders.unfinished_of_all):
            for id in names_in(self._folders.unfinished_of_all / owner):
                stored = is_file(self._folders.root / "jobs" / owner / id / REQUEST)
                if not stored and self._created_s(id) + 3600 <= self._clock():
                    remove(self._folders.unfinished_of_all / owner / id)

    def _created_s(self, id: str) -> float:
        return int(id.removeprefix(BATCH)[:12], 16) / 1000 if is_id(id, BATCH) else self._clock()

    def _stored(self, owner_folder: str, id: str) -> StoredBatch | None:
        """Return a batch; None if it does not exist, or is damaged, of which the log has a line."""
        path = self._folders.root / "jobs" / owner_folder / id / REQUEST
        try:
            fields = read_json(path)
            stored = None if fields is None else StoredBatch.model_validate(fields)
            if stored and (stored.id, owner_name(stored.owner)) != (id, owner_folder):
                raise DataError("it belongs to another batch or account.")
        except (DataError, ValidationError) as error:
            if str(path) not in self._damaged:
                self._damaged.add(str(path))
                log.error("the batch %s is left out: its request is damaged: %s", path, " ".join(str(error).split()))
            return None
        return stored

    def _read(self, owner: str, id: str) -> Batch | None:
        stored = self._stored(owner_name(owner), id)
        if stored is None:
            return None
        cancel = read_json(self.folder(stored) / CANCEL)
        return _object(stored, self.state(stored), cancel["cancelling_at"] if cancel else None)


def _object(stored: StoredBatch, state: BatchState, cancelling_at: int | None) -> Batch:
    request = stored.request
    status = "cancelling" if cancelling_at is not None and state.status not in ENDED else state.status
    return Batch(
        id=stored.id,
        object="batch",
        endpoint=request.endpoint,
        input_file_id=request.input_file_id,
        completion_window=request.completion_window,
        metadata=request.metadata,
        created_at=stored.created_at,
        expires_at=stored.expires_at,
        status=status,
        cancelling_at=cancelling_at,
        in_progress_at=state.in_progress_at,
        finalizing_at=state.finalizing_at,
        completed_at=state.completed_at,
        failed_at=state.failed_at,
        expired_at=state.expired_at,
        cancelled_at=state.cancelled_at,
        model=state.model,
        output_file_id=state.output_file_id,
        error_file_id=state.error_file_id,
        errors=Errors(object="list", data=list(state.errors)) if state.errors else None,
        request_counts=BatchRequestCounts(total=state.total, completed=state.completed, failed=state.failed),
        usage=state.usage,
    )

"""Files of callers in a folder or an object store.

In:    content in chunks, ids; an owner.
Out:   OpenAI's file objects and their content.
Never: shows a file to another owner, shows a file whose content is not complete, or keeps it after its time.

A file is a folder with `content` and `file.json`. `file.json` is written last, so a file that has it is complete.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from fsspec.spec import AbstractBufferedFile
from openai.types.file_object import FileObject

from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.errors import DataError, QuotaError, StoredNotFoundError
from mars_ray.platform.batches.protocol import ObjectPage, StorageLimits
from mars_ray.platform.batches.storage_paths import (
    FILE,
    BatchFolders,
    bytes_below,
    chunks_of,
    created_s,
    is_id,
    make_folder,
    names_in,
    new_id,
    open_blocks,
    owners_in,
    page_of,
    read_json,
    remove,
    unavailable,
    write_json,
)
from mars_ray.storage.location import AnyPath

log = logging.getLogger(__name__)

CONTENT, OBJECT = "content", "file.json"
KEPT_S = 30 * 24 * 3600
"""Seconds that a file is kept unless its owner sets a shorter time."""
ABANDONED_S = 24 * 3600
"""Seconds after which an upload that did not end is removed."""

Purpose = Literal["batch", "batch_output"]


class NewFile:
    """A file that is being written. Call `write` for each chunk, then `finish` or `discard`."""

    def __init__(self, folder: AnyPath, id: str, clock: Callable[[], float], max_bytes: int | None = None) -> None:
        self.id = id
        self.bytes = 0
        self._folder = folder
        self._clock = clock
        self._max_bytes = max_bytes
        with unavailable(folder):
            make_folder(folder)
            self._file: IO[bytes] = open_blocks(folder / CONTENT, "wb")

    def write(self, chunk: bytes) -> None:
        """Append a chunk. Raises `QuotaError` beyond the maximum size, and `UnavailableError`."""
        self.bytes += len(chunk)
        if self._max_bytes is not None and self.bytes > self._max_bytes:
            raise QuotaError(f"the file exceeds the {self._max_bytes} bytes that are left. Delete files, or split it.")
        with unavailable(self._folder):
            self._file.write(chunk)

    def finish(self, filename: str, purpose: Purpose, expires_after_s: int | None = None) -> FileObject:
        """Make the file visible and return its object. Raises `UnavailableError`."""
        with unavailable(self._folder):
            if isinstance(self._folder, Path):
                self._file.flush()
                os.fsync(self._file.fileno())
        self.close()
        created = int(self._clock())
        file = FileObject(
            id=self.id,
            object="file",
            bytes=self.bytes,
            created_at=created,
            expires_at=created + (expires_after_s or KEPT_S),
            filename=filename,
            purpose=purpose,
            status="processed",
        )
        write_json(self._folder / OBJECT, file.model_dump(mode="json"))
        return file

    def close(self) -> None:
        """End the writing without making the file visible. Raises `UnavailableError`."""
        with unavailable(self._folder):
            self._file.close()

    def abort(self) -> None:
        """End the writing. An earlier content stays if the client of the store can abort an upload. Errors are
        ignored."""
        with suppress(Exception):
            if isinstance(self._file, AbstractBufferedFile):
                self._file.closed = True  # its `close` would end the upload and replace the content
                self._file.discard()
            else:
                self.close()

    def discard(self) -> None:
        """Remove what was written. Errors of the storage are ignored, because `FileStore.sweep` repeats the removal."""
        self.abort()
        with suppress(Exception):
            remove(self._folder)


class FileStore:
    """The files of all owners. Methods block, and raise `UnavailableError` if the storage does not answer.

    `clock` returns the Unix time in seconds.
    """

    def __init__(self, folders: BatchFolders, limits: StorageLimits, clock: Callable[[], float] = time.time) -> None:
        self._folders = folders
        self._limits = limits
        self._clock = clock

    def new_upload(self, owner: str) -> NewFile:
        """Begin an upload. Raises `QuotaError` if the owner has no room left."""
        folder = self._folders.files(owner)
        if len(names_in(folder)) >= self._limits.files:
            raise QuotaError(f"{self._limits.files} files are stored already, which is the maximum. Delete files.")
        left = self._limits.bytes - bytes_below(folder)
        if left <= 0:
            raise QuotaError(f"the files hold {self._limits.bytes} bytes already, which is the maximum. Delete files.")
        id = new_id(FILE, self._clock())
        return NewFile(folder / id, id, self._clock, min(left, self._limits.file_bytes))

    def write(self, owner: str, id: str, chunks: Iterable[bytes], filename: str, expires_after_s: int | None) -> None:
        """Store the results of a batch as the file `id`, which replaces an earlier file with this id."""
        folder = self._folders.files(owner) / id
        if isinstance(folder, Path):  # on a disk, content shows while it is written; in a store, it appears whole
            _hide_and_remove(folder)
        file = NewFile(folder, id, self._clock)
        try:
            for chunk in chunks:
                file.write(chunk)
            file.finish(filename, "batch_output", expires_after_s)
        except BaseException:
            if isinstance(folder, Path):
                file.discard()
            else:  # another driver of the batch may have written the file meanwhile
                file.abort()
            raise

    def get(self, owner: str, id: str) -> FileObject:
        """Return the object of a file. Raises `StoredNotFoundError`."""
        file = self._read(owner, id) if is_id(id, FILE) else None
        if file is None:
            raise StoredNotFoundError(f"no file with id {id[:NAME_CHARS]!r} is stored: it was deleted, or has expired.")
        return file

    def content(self, owner: str, id: str) -> Iterator[bytes]:
        """Return the content of a file in chunks. Raises `StoredNotFoundError`."""
        self.get(owner, id)
        return chunks_of(self._folders.files(owner) / id / CONTENT)

    def lines(self, owner: str, id: str) -> IO[bytes]:
        """Return the open content of a file. Raises `StoredNotFoundError`."""
        self.get(owner, id)
        try:
            with unavailable(self._folders.root):
                return open_blocks(self._folders.files(owner) / id / CONTENT, "rb")
        except FileNotFoundError:
            raise StoredNotFoundError(f"the content of the file {id!r} is missing.") from None

    def delete(self, owner: str, id: str) -> None:
        """Delete a file. Raises `StoredNotFoundError`."""
        self.get(owner, id)
        _hide_and_remove(self._folders.files(owner) / id)

    def page(
        self, owner: str, *, after: str | None, limit: int, order: Literal["asc", "desc"], purpose: str | None = None
    ) -> ObjectPage[FileObject]:
        """Return up to `limit` files after the file `after`."""

        def read(id: str) -> FileObject | None:
            try:
                file = self._read(owner, id)
            except DataError as error:
                log.error("a file is left out: %s", error)
                return None
            return file if file is not None and purpose in (None, file.purpose) else None

        return page_of(names_in(self._folders.files(owner)), read, after=after, limit=limit, order=order)

    def bytes_of_all(self) -> int:
        """Return the bytes of the files of all owners, uploads that have not ended included."""
        return bytes_below(self._folders.root / "files")

    def sweep(self, kept: Collection[str]) -> None:
        """Remove expired files, and uploads that were abandoned, except the ids in `kept`."""
        files = self._folders.root / "files"
        for owner in owners_in(files):
            for id in names_in(files / owner):
                if is_id(id, FILE) and id not in kept and self._clock() >= self._ends_s(files / owner / id):
                    remove(files / owner / id)

    def _ends_s(self, folder: AnyPath) -> float:
        """Return the Unix time at which a file is removed. A file with a damaged object stays its longest time."""
        try:
            fields = read_json(folder / OBJECT)
            return created_s(folder.name) + ABANDONED_S if fields is None else float(fields["expires_at"])
        except (DataError, KeyError, TypeError, ValueError) as error:
            log.error("the file %s is damaged: %s", folder, error)
            return created_s(folder.name) + KEPT_S

    def _read(self, owner: str, id: str) -> FileObject | None:
        fields = read_json(self._folders.files(owner) / id / OBJECT)
        if fields is None:
            return None
        try:
            return FileObject.model_validate(fields) if fields["expires_at"] > self._clock() else None
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the file {id} is damaged: {error}") from error


def _hide_and_remove(folder: AnyPath) -> None:
    remove(folder / OBJECT)  # first, so that the file is gone even if its content stays until the next sweep
    remove(folder)

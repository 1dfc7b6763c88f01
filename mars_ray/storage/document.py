"""One small document that several processes change by compare-and-swap, in a file or in a folder of versions.

In:    the new content, and the version from which the change was made.
Out:   the newest content with its version; whether the change was the first one made from that version.
Never: loses a change: of two changes made from the same version, only one succeeds, and the other is made again.

On one machine the document is a file, under a lock. For several machines it is a folder, on a shared disk or in an
object store, whose objects are numbered versions, each created only if it does not exist. A store without conditional
writes (HDFS, or an S3 server that ignores `If-None-Match`) may lose one of two changes made within milliseconds.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from mars_ray.errors import DataError, OutputError
from mars_ray.storage.location import AnyPath, store_errors
from mars_ray.storage.private import private_folder
from mars_ray.storage.whole_file import create_file, replace_file

Version = tuple[int, ...]
"""Identifies a version: any change of the document changes it."""
KEPT_VERSIONS = 16
KEPT_S = 86400.0
"""Seconds for which old versions are kept at least. A writer that needs longer than this to write could otherwise
create a version whose number was used before."""
OWNER_ONLY = 0o600
_NAME = re.compile(r"\d{10}\.json")
_READ_ADVICE = "Check the path, and access to it."
_WRITE_ADVICE = "Nothing was changed."


class Content(NamedTuple):
    """A document at one moment."""

    version: Version | None
    """None if the document does not exist."""
    data: bytes


class Document(Protocol):
    """The document, wherever it is."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""

    def version(self) -> Version | None:
        """Return the newest version, or None if the document does not exist. Raises `DataError` if it cannot be
        read."""

    def read(self) -> Content:
        """Return the newest content. Raises `DataError` if it cannot be read."""

    def swap(self, version: Version | None, data: bytes) -> bool:
        """Replace the content if `version` is still the newest, and return whether it was.

        Raises `OutputError` if it cannot be written. Then nothing was changed, unless only the reply was lost.
        """


class FileDocument:
    """A document in one file of this machine, which people may edit too. Only its owner can read it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)

    def version(self) -> Version | None:
        """Return the file's modification time, inode and size."""
        with store_errors(self._path, DataError, "Cannot read", _READ_ADVICE):
            try:
                status = self._path.stat()
            except FileNotFoundError:
                return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def read(self) -> Content:
        """Return the content of the file."""
        # Take the version before reading: if the file changes in between, a swap fails and the next check reads again.
        version = self.version()
        with store_errors(self._path, DataError, "Cannot read", _READ_ADVICE):
            return Content(version, self._path.read_bytes() if version else b"")

    def swap(self, version: Version | None, data: bytes) -> bool:
        """Replace the file atomically and durably."""
        file = self._path.resolve()  # writing must not replace a symbolic link
        with store_errors(file, OutputError, "Cannot write", _WRITE_ADVICE), _locked(file):
            if self.version() != version:
                return False
            replace_file(file, [data], mode=OWNER_ONLY)  # durably, or a revoked key could come back
        return True


class VersionedDocument:
    """A document as a folder of numbered versions."""

    def __init__(self, folder: AnyPath) -> None:
        self._folder = folder
        self.name = str(folder)

    def version(self) -> Version | None:
        """Return the number of the newest version."""
        names = self._names()
        return (_number(names[-1]),) if names else None

    def read(self) -> Content:
        """Return the newest version."""
        with store_errors(self._folder, DataError, "Cannot read", _READ_ADVICE):
            while names := self._names():
                with suppress(FileNotFoundError):  # newer versions exist by now
                    return Content((_number(names[-1]),), (self._folder / names[-1]).read_bytes())
        return Content(None, b"")

    def swap(self, version: Version | None, data: bytes) -> bool:
        """Create the next version unless it exists."""
        path = self._folder / f"{(version or (0,))[0] + 1:010}.json"
        with store_errors(self._folder, OutputError, "Cannot write to", _WRITE_ADVICE):
            # After a lost reply the store's client tries again and finds the object that it has created.
            if isinstance(path, Path):
                private_folder(path.parent)
            created = create_file(path, data, mode=OWNER_ONLY) or path.read_bytes() == data
        if created:
            with suppress(Exception):  # the next change prunes again
                self._prune()
        return created

    def _names(self) -> list[str]:
        with store_errors(self._folder, DataError, "Cannot read", _READ_ADVICE):
            if isinstance(self._folder, Path):
                paths = [path.name for path in self._folder.iterdir()] if self._folder.exists() else []
            else:
                paths = [str(path).rpartition("/")[2] for path in self._folder.fs.find(self._folder.path)]
        return sorted(filter(_NAME.fullmatch, paths))

    def _prune(self) -> None:
        names = self._names()
        newest_s = (self._folder / names[-1]).stat().st_mtime  # the clock of the store, as for the older versions
        for name in names[:-KEPT_VERSIONS]:
            path = self._folder / name
            if newest_s - path.stat().st_mtime < KEPT_S:
                return
            path.unlink()


def _number(name: str) -> int:
    return int(name.partition(".")[0])


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock the file within the block, by a second file, because every change replaces the first."""
    descriptor = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

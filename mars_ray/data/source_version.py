"""Tell whether a data file has changed, by the stamp of its disk or store, and by its digest if the stamp differs."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mars_ray.errors import DataError
from mars_ray.storage.location import AnyPath, store_errors

DIGEST_BYTES = 8
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceVersion:
    """The version of a data file that was read."""

    bytes: int
    stamp: str
    """Time of the last change on a disk, or a hash of what a store says about the object, such as its ETag."""
    digest: str
    """blake2b of the content, 16 hexadecimal digits."""


def version_of(source: AnyPath) -> SourceVersion:
    """Return the version of a file, which is read to its end. Raises `DataError` if it cannot be read."""
    with store_errors(source, DataError, "Cannot read", "Check the file."):
        return SourceVersion(source.stat().st_size, _stamp(source), _digest(source))


def has_changed(source: AnyPath, version: SourceVersion) -> bool:
    """Return whether a file has other content than this version. A file that is gone has not changed.

    The content is read only if the stamp differs, as in a copy of the file. Raises `DataError` if the file cannot be
    read.
    """
    with store_errors(source, DataError, "Cannot read", "Check the file."):
        if not source.exists() or _stamp(source) == version.stamp:
            return False
        return source.stat().st_size != version.bytes or _digest(source) != version.digest


def _stamp(source: AnyPath) -> str:
    return str(source.stat().st_mtime_ns) if isinstance(source, Path) else source.fs.ukey(source.path)


def _digest(source: AnyPath) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with source.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()

"""Names, ids and folders below the storage of an endpoint, in a local folder or an object store.

In:    the owner of a request, ids from callers.
Out:   paths; the names in a folder.
Never: lets an id or an owner from outside become part of a path unless it has the form of our own.

Ids begin with their time of creation, so sorted names are in order of creation, and a page of a list reads only the
objects that it shows.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, Literal, TypeVar

from openai.types.batch import Batch
from openai.types.file_object import FileObject

from mars_ray.errors import DataError, UnavailableError
from mars_ray.platform.batches.protocol import ObjectPage
from mars_ray.storage.location import AnyPath, locate
from mars_ray.storage.private import private_folder
from mars_ray.storage.whole_file import write_file

log = logging.getLogger(__name__)

FILE, BATCH = "file-", "batch_"
"""Prefixes of the ids."""
RESULTS = ("output", "error")
"""Names of a batch's files of results."""
BLOCK_BYTES = 8 << 20
"""Bytes of a file to send or read at a time. A multipart upload to S3 has up to 10,000 parts of at least 5 MiB."""
LINE_BYTES = 1 << 18
"""Bytes of a file in a store that are searched for the end of a line at a time."""
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_OWNER_NAME = re.compile(r"[0-9a-f]{32}")
T = TypeVar("T", FileObject, Batch)


@dataclass(frozen=True, slots=True)
class BatchFolders:
    """Folders of files and batches."""

    root: AnyPath

    @classmethod
    def below(cls, storage: str) -> "BatchFolders":
        """Return the folders in the storage of an endpoint. Raises `ConfigError` for a URL that cannot be used, and
        `OutputError` for a folder that cannot be made private."""
        root = locate(storage) / "batches"
        if isinstance(root, Path):
            private_folder(root)
        return cls(root)

    def files(self, owner: str) -> AnyPath:
        """Return the folder of an owner's files."""
        return self.root / "files" / owner_name(owner)

    def batches(self, owner: str) -> AnyPath:
        """Return the folder of an owner's batches."""
        return self.root / "jobs" / owner_name(owner)

    def unfinished(self, owner: str) -> AnyPath:
        """Return the folder that has one object for each batch of an owner that has not ended."""
        return self.unfinished_of_all / owner_name(owner)

    @property
    def unfinished_of_all(self) -> AnyPath:
        """Folder of the unfinished batches of all owners."""
        return self.root / "unfinished"


def owner_name(owner: str) -> str:
    """Return the name of an owner's folder, which does not reveal the owner."""
    return hashlib.blake2b(owner.encode(), digest_size=16).hexdigest()


def owners_in(folder: AnyPath) -> list[str]:
    """Return the names of owners' folders in a folder, and no stray names. Raises `UnavailableError`."""
    return [name for name in names_in(folder) if _OWNER_NAME.fullmatch(name)]


def new_id(prefix: str, unix_s: float) -> str:
    """Return a new id, which begins with the time and cannot be guessed."""
    return f"{prefix}{int(max(0.0, unix_s) * 1000):012x}{token_hex(10)}"


def result_id(batch_id: str, name: str) -> str:
    """Return the id of a batch's file of results, one of `RESULTS`. It is the same each time."""
    digits = batch_id.removeprefix(BATCH)
    return FILE + digits[:12] + hashlib.blake2b(f"{name}:{batch_id}".encode(), digest_size=10).hexdigest()


def is_id(id: str, prefix: str) -> bool:
    """Return whether a text from outside has the form of our ids."""
    return id.startswith(prefix) and _ID.fullmatch(id) is not None


def created_s(id: str) -> float:
    """Return the Unix time at which one of our ids was made, in seconds."""
    return int(id[-32:-20], 16) / 1000


def page_of(
    names: list[str], read: Callable[[str], T | None], *, after: str | None, limit: int, order: Literal["asc", "desc"]
) -> ObjectPage[T]:
    """Return the page of up to `limit` objects that follow the id `after` in this order. An unknown id is sorted like
    the others. `read` returns None for names that are left out."""
    if order == "asc":
        ordered = [name for name in names if after is None or name > after]
    else:
        ordered = [name for name in reversed(names) if after is None or name < after]
    objects = list(islice((item for item in map(read, ordered) if item is not None), limit + 1))
    page = objects[:limit]
    return ObjectPage(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(objects) > limit,
    )


def names_in(folder: AnyPath) -> list[str]:
    """Return the names in a folder, sorted; none if it is no folder. Raises `UnavailableError`."""
    with unavailable(folder):
        try:
            names = {path.name for path in folder.iterdir()}
            return sorted(names - {folder.name})  # some stores list the folder itself too
        except (FileNotFoundError, NotADirectoryError):
            return []


def bytes_below(folder: AnyPath) -> int:
    """Return the size of all files below a folder. Raises `UnavailableError`."""
    with unavailable(folder):
        if isinstance(folder, Path):
            files = os.walk(folder, onerror=_raise_unless_removed)
            return sum(_size(Path(parent, name)) for parent, _, names in files for name in names)
        return sum(info["size"] or 0 for info in folder.fs.find(folder.path, detail=True).values())


def _raise_unless_removed(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):  # removed meanwhile
        return path.stat().st_size
    return 0


def read_json(path: AnyPath) -> dict[str, Any] | None:
    """Return the object in a file, or None if there is no file.

    Raises `UnavailableError`, and `DataError` for a damaged file.
    """
    with unavailable(path):
        try:
            content = path.read_bytes() if isinstance(path, Path) else path.fs.cat_file(path.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise DataError(f"{path} holds no JSON object. Restore it, or remove its folder.")
    return fields


def is_file(path: AnyPath) -> bool:
    """Return whether a file exists. Raises `UnavailableError`."""
    with unavailable(path):
        return path.is_file()


def write_json(path: AnyPath, fields: dict[str, Any]) -> None:
    """Replace a file by an object, whole or not at all. Raises `UnavailableError`."""
    with unavailable(path):
        make_folder(path.parent)
        write_file(path, [json.dumps(fields).encode()])


def remove(path: AnyPath) -> None:
    """Remove a file, or a folder with all it holds; nothing if it does not exist. Raises `UnavailableError`."""
    with unavailable(path), suppress(FileNotFoundError):
        if not isinstance(path, Path):
            path.fs.rm(path.path, recursive=True)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def make_folder(folder: AnyPath) -> None:
    """Create a folder on a disk. Stores need none."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)


def open_blocks(path: AnyPath, mode: Literal["rb", "wb"]) -> IO[bytes]:
    """Open a file, of which at most a few blocks are in memory. Raises the errors of the disk or the store."""
    if isinstance(path, Path):
        return path.open(mode)
    file: Any = path.open(mode, block_size=BLOCK_BYTES)
    # Files of stores have no `readline` with a maximum length.
    return io.BufferedReader(file, LINE_BYTES) if mode == "rb" else file


def chunks_of(path: AnyPath, size: int = 1 << 18) -> Iterator[bytes]:
    """Yield the content of a file in chunks of up to `size` bytes. Raises `UnavailableError`."""
    with unavailable(path), open_blocks(path, "rb") as file:
        while chunk := file.read(size):
            yield chunk


def lines_of(path: AnyPath) -> Iterator[bytes]:
    """Yield the lines of a file. Raises `UnavailableError`."""
    with unavailable(path), open_blocks(path, "rb") as file:
        yield from file


@contextmanager
def unavailable(path: AnyPath) -> Iterator[None]:
    """Convert errors of the storage, except a missing file, into `UnavailableError`, whose message names no path."""
    try:
        yield
    except (UnavailableError, FileNotFoundError):
        raise
    except Exception as error:  # clients of stores raise errors of any class
        log.warning("cannot use %s: %s", path, error)
        raise UnavailableError("the storage of files and batches does not answer. Try again later.") from error

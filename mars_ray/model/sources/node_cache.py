"""The cache of models fetched from other machines and stores; a machine fetches each model once.

In:    the files of a folder, each with size and digest, and a function that reads pieces of a file.
Out:   a local folder with the files, even if several processes ask for it at once; an interrupted fetch is resumed.
Never: returns an incomplete file, removes a folder in use, or takes up more than half of the available disk space.

The name of a folder is a digest of its content. A process holds a shared lock on the folders that it uses until it
ends. The least recently used folders are removed to make room for a new one.
"""

import atexit
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO

from mars_ray.errors import ModelError, OutputError
from mars_ray.model.sources.cache import cache_folder
from mars_ray.progress import ProgressLine
from mars_ray.storage.location import wait_at_most
from mars_ray.storage.private import private_folder

NODE_URL = "ray://"
"""Prefix of the name of a folder on one node of the cluster; see `ray_folder.SharedFolder`."""
PIECE_BYTES = 8 << 20
PIECE_S = 30.0
"""Time limit for one piece, in seconds. Earlier pieces are kept, and the next fetch continues after them."""
NAME_DIGITS = 32
_in_use = ExitStack()
"""Locks that are held until this process ends."""
atexit.register(_in_use.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file on another machine or in a store."""

    name: str
    size: int
    """Size in bytes."""
    digest: str
    """Version of the content: `blake2b:` and a digest, which is checked, or a version assigned by the store."""


ReadPiece = Callable[[str, int, int], bytes]
"""Takes (name, start, end), and returns this piece of the file called name."""


def fetched(
    name: str, files: Sequence[RemoteFile], read: ReadPiece, unchanged: Callable[[], bool] = lambda: True
) -> Path:
    """Return a folder called `name` with `files`; fetch them first if the cache lacks this content.

    Raises `ModelError` if a file does not have the stated size or digest, the files are not `unchanged` once they are
    fetched, or the model is too large for the cache, `OutputError` if the cache is not writable, and any error of
    `read`.
    """
    content = json.dumps([name, [asdict(file) for file in sorted(files, key=lambda file: file.name)]])
    key = hashlib.blake2b(content.encode(), digest_size=NAME_DIGITS // 2).hexdigest()
    cache = _cache()
    folder = cache / key / name
    try:
        private_folder(cache, within=cache.parent)
        lock = (cache / f"{key}.lock").open("ab")
    except (OSError, OutputError) as error:
        raise OutputError(f"the cache {cache} cannot be used: {error}. Set XDG_CACHE_HOME to another folder.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        while not folder.exists():
            with _alone(lock):
                if not folder.exists():
                    _make_room(cache, key, sum(file.size for file in files))
                    _fetch(cache / f"{key}.partial" / name, files, read)
                    if not unchanged():
                        shutil.rmtree(cache / f"{key}.partial")
                        raise ModelError(f"{name} has changed while it was fetched. Try again.")
                    (cache / f"{key}.partial").rename(cache / key)
        os.utime(lock.name)
    except BaseException:
        lock.close()
        raise
    _in_use.enter_context(lock)
    return folder


def is_fetched(folder: Path) -> bool:
    """Return whether `folder` is in this cache, in which case it must not be changed."""
    return folder.absolute().is_relative_to(_cache())


def _cache() -> Path:
    return cache_folder().parent / "fetched"


def file_digest(path: Path) -> str:
    """Return the digest of a local file for `RemoteFile`; about a gigabyte is read per second."""
    with path.open("rb") as file:
        return f"blake2b:{hashlib.file_digest(file, 'blake2b').hexdigest()}"


@contextmanager
def _alone(lock: IO[bytes]) -> Iterator[None]:
    fcntl.flock(lock, fcntl.LOCK_UN)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_SH)


def _fetch(folder: Path, files: Sequence[RemoteFile], read: ReadPiece) -> None:
    """Fetch the missing pieces of `files` into `folder`."""
    total = sum(file.size for file in files)
    with ProgressLine(f"fetch {folder.name}", total=total) as progress:
        before = 0
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as sink:
                while (start := sink.tell()) < file.size:
                    end = min(start + PIECE_BYTES, file.size)
                    timeout = ModelError(
                        f"{file.name} of {folder.name} cannot be fetched: {end - start:,} bytes took over "
                        f"{PIECE_S:g} s. Check the network and run the same command again; it continues."
                    )
                    if not (piece := wait_at_most(PIECE_S, partial(read, file.name, start, end), timeout)):
                        break  # the file has become shorter, which its size shows below
                    sink.write(piece)
                    progress.update(before + sink.tell(), {})
                sink.flush()
                os.fsync(sink.fileno())
            before += file.size
            if path.stat().st_size != file.size or (
                file.digest.startswith("blake2b:") and file_digest(path) != file.digest
            ):
                path.unlink()
                raise ModelError(f"{file.name} of {folder.name} arrived with another size or digest. Try again.")


def _make_room(cache: Path, key: str, size: int) -> None:
    """Remove unused folders, the least recently used first, until `size` bytes fit."""
    kept = {
        lock: _size(lock.with_suffix("")) + _size(lock.with_suffix(".partial"))
        for lock in cache.glob("*.lock")
        if lock.stem != key
    }
    used = sum(kept.values())
    limit = (shutil.disk_usage(cache).free + used) // 2
    if size > limit:
        raise ModelError(
            f"a model of {size / 1e9:.1f} GB does not fit: the cache {cache} may take {limit / 1e9:.1f} GB, half of "
            "the free space. Make room, or set XDG_CACHE_HOME to a larger disk."
        )
    for path in sorted(kept, key=lambda lock: lock.stat().st_mtime):
        if used + size <= limit:
            return
        with path.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # in use
                continue
            _remove(path.with_suffix(""))
            used -= kept[path]
    if used + size > limit:
        raise ModelError(
            f"a model of {size / 1e9:.1f} GB does not fit next to those in use: the cache {cache} may take "
            f"{limit / 1e9:.1f} GB. Make room, or set XDG_CACHE_HOME to a larger disk."
        )


def _remove(folder: Path) -> None:
    """Remove a folder, and what was fetched of it. If this is interrupted, a later fetch completes the rest."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with suppress(OSError):  # there may be a partial folder only
        folder.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

"""Files and folders that appear whole or not at all, on a disk and in a store."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from upath import UPath

from mars_ray.errors import RunError
from mars_ray.storage.location import AnyPath, store_errors


def write_file(path: AnyPath, parts: Iterable[bytes | memoryview]) -> None:
    """Write what `parts` are together, over what was there; it is on the disk or in the store when this returns.

    Raises `RunError` when it cannot be written.
    """
    advice = "Make room or mend the cause, then give the same command again."
    with store_errors(path.parent, RunError, "Cannot write any more to", advice):
        if isinstance(path, Path):
            _to_disk(path, parts)
        else:  # an object is there when all of it has arrived
            path.fs.pipe_file(path.path, b"".join(parts))


def write_folder(place: AnyPath, write: Callable[[Path], object], *, last: str) -> None:
    """Make the folder `place` by `write`, which is called with the path to make it at, on this machine.

    In a store the file called `last` comes last: a folder that has it is whole. Raises what `write` raises, and
    `RunError` when a store does not take it.
    """
    if isinstance(place, Path):
        write(place)
        return
    with TemporaryDirectory() as here:
        folder = Path(here) / place.name
        write(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        with store_errors(place, RunError, "Cannot write", "Mend the cause, then give the same command again."):
            for path in sorted(files, key=lambda path: path.name == last):
                place.fs.put_file(str(path), (place / path.relative_to(folder).as_posix()).path)


def create_object(path: UPath, content: bytes) -> bool:
    """Write `content` unless there is an object already; return whether it was written.

    Of several who do this at once one succeeds, where the store has conditional writes: S3, Google Cloud Storage and
    Azure have. Elsewhere it is looked first and written then. Raises what the client of the store raises.
    """
    try:
        path.fs.pipe_file(path.path, content, mode="create")
    except FileExistsError:
        return False
    return True


def _to_disk(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name is on the disk too
    finally:
        os.close(folder)

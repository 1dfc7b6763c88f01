"""Write files and folders that appear either complete or not at all, on a disk or in a store."""

import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from upath import UPath

from mars_ray.errors import RunError
from mars_ray.storage.location import AnyPath, store_errors

WRITE_ADVICE = "Make room or remove the cause, then give the same command again."


def write_file(path: AnyPath, parts: Iterable[bytes | memoryview]) -> None:
    """Durably replace the contents of a file with the concatenated `parts`. Raises `RunError` if it cannot be
    written."""
    with store_errors(path.parent, RunError, "Cannot write to", WRITE_ADVICE):
        if isinstance(path, Path):
            _to_disk(path, parts)
        else:  # an object appears only after its upload is complete
            path.fs.pipe_file(path.path, b"".join(parts))


def write_new_object(path: AnyPath, content: bytes) -> None:
    """Write an object unless it exists. Raises `RunError` if it cannot be written."""
    assert isinstance(path, UPath)
    with store_errors(path.parent, RunError, "Cannot write to", WRITE_ADVICE):
        create_object(path, content)


def write_lines(path: AnyPath, lines: Iterable[str]) -> None:
    """Write lines of text to a file. Raises `RunError` if the file cannot be written."""
    write_file(path, (line.encode() + b"\n" for line in lines))


def write_folder(target: AnyPath, write: Callable[[Path], object], *, last: str) -> None:
    """Write the folder `target` by calling `write` with a local path, and upload it if `target` is in a store.

    The file named `last` is uploaded last, so a folder that contains this file is complete. Raises the errors of
    `write`, and `RunError` if the upload fails.
    """
    if isinstance(target, Path):
        write(target)
        return
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / target.name
        write(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        with store_errors(target, RunError, "Cannot write", "Remove the cause, then give the same command again."):
            for path in sorted(files, key=lambda path: path.name == last):
                target.fs.put_file(str(path), (target / path.relative_to(folder).as_posix()).path)


def create_file(path: AnyPath, content: bytes) -> bool:
    """Durably create a file unless it exists, and return whether it was created.

    The file appears whole. Its folder must exist on a disk. Raises the errors of the disk or of the store's client.
    """
    if not isinstance(path, Path):
        return create_object(path, content)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(partial)  # unlike a rename, a link never replaces a file
        except FileExistsError:
            return False
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return True


def create_object(path: UPath, content: bytes) -> bool:
    """Create an object unless it exists, and return whether it was created. Raises the errors of the store's client.

    The operation is atomic in stores with conditional writes: S3, Google Cloud Storage and Azure. Other stores check
    first and then write.
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
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Make new names in a folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

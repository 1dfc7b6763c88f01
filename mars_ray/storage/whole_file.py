"""Write files and folders that appear either complete or not at all, on a disk or in a store."""

import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from upath import UPath

from mars_ray.errors import RunError
from mars_ray.storage.location import AnyPath, store_errors

WRITE_ADVICE = "Make room or remove the cause, then give the same command again."
CONFLICTS = 5
"""Number of conflicts with other writes after which an attempt to create an object fails."""
CONFLICT_PAUSE_S = 0.2
"""Seconds between a conflict and the next attempt."""


def write_file(path: AnyPath, parts: Iterable[bytes | memoryview]) -> None:
    """Durably replace the contents of a file with the concatenated `parts`. Raises `RunError` if it cannot be
    written."""
    with store_errors(path.parent, RunError, "Cannot write to", WRITE_ADVICE):
        if isinstance(path, Path):
            replace_file(path, parts)
        else:  # an object appears only after its upload is complete
            path.fs.pipe_file(path.path, b"".join(parts))


def write_new_object(path: AnyPath, content: bytes) -> bool:
    """Write an object unless it exists, and return whether it now has this content. Raises `RunError` if it cannot be
    written."""
    assert isinstance(path, UPath)
    with store_errors(path.parent, RunError, "Cannot write to", WRITE_ADVICE):
        return create_object(path, content) or path.read_bytes() == content


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


def create_file(path: AnyPath, content: bytes, *, mode: int = 0o666) -> bool:
    """Durably create a file unless it exists, and return whether it was created.

    The file appears whole. On a disk its folder must exist, and `mode` limits its permissions. Raises the errors of the
    disk or of the store's client.
    """
    if not isinstance(path, Path):
        return create_object(path, content)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        _write(partial, [content], mode)
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
    conflicts = 0
    while True:
        try:
            path.fs.pipe_file(path.path, content, mode="create")
            return True
        except FileExistsError:
            return False
        except OSError as error:
            status, code = _s3_error(error)
            if status == 412:  # s3fs raises FileExistsError only if the response names the condition, as that of AWS
                return False
            conflicts += 1
            if code != "ConditionalRequestConflict" or conflicts == CONFLICTS:
                raise
        time.sleep(CONFLICT_PAUSE_S)


def replace_file(path: Path, parts: Iterable[bytes | memoryview], *, mode: int = 0o666) -> None:
    """Durably replace a file on a disk. Raises the errors of the disk.

    Several processes may call it at the same time. The file then has the content of the last one, whole.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        _write(partial, parts, mode)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)  # the new name must survive a power cut


def _s3_error(error: OSError) -> tuple[int | None, str | None]:
    """Return the HTTP status and the error code of a response of S3, or twice None if `error` has another cause."""
    response = getattr(error.__cause__, "response", None)  # of botocore, which other stores do not need
    if not isinstance(response, dict):
        return None, None
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"].get("Code")


def _write(path: Path, parts: Iterable[bytes | memoryview], mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

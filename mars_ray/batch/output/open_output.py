"""Open the output of a job, in a local folder or in a store such as `s3://bucket/answers`.

A local folder contains the ledger, and a lock keeps other drivers out. A store contains the log of the job. Each new
driver rebuilds the ledger from the log in a temporary folder, so a job in a store can be resumed from any machine.
"""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from upath import UPath

from mars_ray.batch.output.folder import OutputFolder
from mars_ray.batch.output.job_log import JobLog
from mars_ray.batch.output.ledger import LEDGER, Ledger
from mars_ray.errors import OutputError
from mars_ray.storage.driver_lease import DriverLease, locked
from mars_ray.storage.location import AnyPath, check_reachable, store_errors

LOG = "log"
P = TypeVar("P", Path, UPath)


def open_output(folder: AnyPath, *, new: bool) -> AbstractContextManager[OutputFolder]:
    """Create or resume the output of a job in a folder. If `new`, an earlier output is renamed first.

    Entering the context raises `OutputError` if the folder contains files that do not belong to a job, is in use by
    another process or cannot be written, and `ConfigError` if the store cannot be reached. On exit, a new output
    without any finished row is removed.
    """
    if isinstance(folder, Path):
        return _open_local_output(folder, new=new)
    return _open_stored_output(folder, new=new)


def is_job_output(folder: AnyPath) -> bool:
    """Return whether a folder is the output of a job: it has a ledger, a log, or what is left without them."""
    hidden = folder / LEDGER.parent
    return any((hidden / name).exists() for name in (LEDGER.name, LOG)) or all(
        (folder / name).exists() for name in ("report.json", "report.html", "rows")
    )


@contextmanager
def _open_local_output(folder: Path, *, new: bool) -> Iterator[OutputFolder]:
    hidden = folder / LEDGER.parent
    if new and hidden.exists():
        with locked(hidden / "lock", of=folder):
            folder.rename(_backup_name(folder))
    if folder.exists() and not hidden.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} has files that do not belong to a job. Give a new folder or empty this one.")
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        (folder / "rows").mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"Cannot write to {folder}: {error.strerror}. Give another output folder.") from error
    with locked(hidden / "lock", of=folder):
        ledger = Ledger(folder / LEDGER, of=folder, durable=True)
        try:
            yield OutputFolder(folder, ledger)
        finally:
            empty = not ledger.done
            ledger.close()
            if empty and created:
                shutil.rmtree(created[-1])


def _backup_name(folder: P) -> P:
    number = 1
    while (backup := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    return backup


@contextmanager
def _open_stored_output(folder: UPath, *, new: bool) -> Iterator[OutputFolder]:
    check_reachable(folder)
    hidden = folder / LEDGER.parent
    with (
        DriverLease(hidden / "driver.json", of=folder).held(),
        TemporaryDirectory() as temporary,
        closing(Ledger(Path(temporary) / LEDGER.name, of=folder, durable=False)) as ledger,
    ):
        with store_errors(folder, OutputError, "Cannot use", "Give another output."):
            if new:
                _rename_stored(folder)
            elif not (hidden / LOG).exists() and _names(folder):
                raise OutputError(
                    f"{folder} has files that do not belong to a job. Give a new folder or empty this one."
                )
        log = JobLog(hidden / LOG)
        output = OutputFolder(folder, ledger, log)
        output.replay(log.read())
        with log.kept():
            yield output
        if not ledger.done:
            with suppress(FileNotFoundError):
                log.remove()


def _names(folder: UPath) -> list[str]:
    """Return the names of the objects in a folder, except that of the driver's lease."""
    return [name for name in folder.fs.find(folder.path) if not name.endswith("/driver.json")]


def _rename_stored(folder: UPath) -> None:
    """Rename a folder in a store: copy all objects, then remove the originals.

    The log is removed last, so that an interrupted rename can be repeated.
    """
    backup = _backup_name(folder)
    fs = folder.fs
    names = _names(folder)
    for name in names:
        fs.copy(name, backup.path + name.removeprefix(folder.path))
    for name in sorted(names, key=lambda name: f"/{LEDGER.parent}/" in name):
        fs.rm(name)

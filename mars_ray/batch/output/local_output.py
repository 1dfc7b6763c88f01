"""The output of a job in a folder of this machine: the ledger lies in it, and a lock keeps other drivers out."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mars_ray.batch.output.folder import OutputFolder
from mars_ray.batch.output.history import History
from mars_ray.batch.output.ledger import LEDGER, Ledger
from mars_ray.errors import OutputError


@contextmanager
def open_local_output(folder: Path, *, new: bool) -> Iterator[OutputFolder]:
    """Make or go on with an output folder on this machine; `new` puts an earlier one aside.

    Raises `OutputError` for a folder that holds something else, that another process works in, or that cannot be
    written to. A folder made here that stays without a row is removed.
    """
    hidden = folder / LEDGER.parent
    if new and hidden.exists():
        with _only_one(hidden):
            folder.rename(_aside(folder))
    if folder.exists() and not hidden.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} holds something that is no job. Give a new folder or empty this one.")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        (folder / "rows").mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"Cannot write to {folder}: {error.strerror}. Give another output folder.") from error
    with _only_one(hidden):
        ledger = Ledger(folder / LEDGER, of=folder, durable=True)
        try:
            yield OutputFolder(folder, ledger, History(ledger))
        finally:
            empty = not ledger.done
            ledger.close()
            if empty and made:
                shutil.rmtree(made[-1])


@contextmanager
def _only_one(hidden: Path) -> Iterator[None]:
    try:
        lock = (hidden / "lock").open("w")
    except OSError as error:
        raise OutputError(f"Cannot write to {hidden}: {error.strerror}. Give another output folder.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"Another process is working in {hidden.parent}. Wait for it, or give another output folder."
            ) from None
        yield


def _aside(folder: Path) -> Path:
    number = 1
    while (found := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    return found

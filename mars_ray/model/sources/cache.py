"""The cache of models that were converted here: each folder is made once, whole.

In:    the name of a folder, and what writes it.
Out:   the folder, however many processes ask for it at a time and whatever was killed before.
Never: shows a half-written folder.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from mars_ray.errors import OutputError
from mars_ray.storage.private import private_folder


def cache_folder() -> Path:
    """Return where converted models lie: `mars-ray/models` in XDG_CACHE_HOME, which is `~/.cache` by default."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path("~/.cache").expanduser()) / "mars-ray" / "models"


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder or file `name` of the cache; where it is not there yet, `make` is called with its path.

    `make` writes under another name, as `scratch_for` gives one, and renames. Of several processes one makes it and
    the others wait. What a killed one left is removed. Raises an `OutputError` where the cache cannot be written to.
    """
    path = cache_folder() / name
    if not path.exists():
        with _locked(path.parent):
            for left in path.parent.glob(f".{escape(name)}.*.partial"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            if not path.exists():
                make(path)
    return path


@contextmanager
def scratch_for(path: Path) -> Iterator[Path]:
    """Make a folder beside `path` for what is needed until `path` is made, and remove it."""
    folder = path.with_name(f".{path.name}.scratch.partial")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for a lock on `folder`, which the system takes from whoever dies."""
    try:
        descriptor = os.open(private_folder(folder, within=cache_folder().parent), os.O_RDONLY)
    except (OSError, OutputError) as error:
        raise OutputError(
            f"the cache {folder} cannot be used: {error}. Set XDG_CACHE_HOME to another folder."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

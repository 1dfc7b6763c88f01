"""The cache of converted models; each model is converted once.

In:    the name of a folder, and a function that writes it.
Out:   the complete folder, even if several processes ask for it at once or a process is killed.
Never: shows a half-written folder.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from mars_ray.errors import ModelError, OutputError
from mars_ray.storage.private import private_folder

CONVERSION = 3
"""Number of the conversion of .gguf files; they are converted again when it changes."""
SOURCE = "source"
"""Name of the link to the folder that cached files were made from."""


def cache_folder() -> Path:
    """Return the folder of converted models: `mars-ray/models` in XDG_CACHE_HOME (default: `~/.cache`)."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path("~/.cache").expanduser()) / "mars-ray" / "models"


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder or file `name` in the cache; if it is missing, first call `make` with the path.

    `make` must write under another name, such as one in `scratch_for`, and rename the result. One process calls `make`
    while others wait. Leftovers of killed processes are removed. Raises `OutputError` if the cache is not writable, or
    belongs to somebody else.
    """
    path = _private(cache_folder()) / name
    if not path.exists():
        with _locked(path.parent):
            for leftover in path.parent.glob(f".{escape(path.name)}.*.partial"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            if not path.exists():
                try:
                    make(path)
                except ModelError:
                    if not path.exists():  # a reader whose parent was killed may have made it meanwhile
                        raise
    return path


@contextmanager
def scratch_for(path: Path) -> Iterator[Path]:
    """Create a temporary folder next to `path`, and remove it at the end of the block."""
    folder = path.with_name(f".{path.name}.scratch.partial")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder`, which the system releases if this process dies."""
    descriptor = os.open(_private(folder), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _private(folder: Path) -> Path:
    """Return a folder of the cache that nobody else can change; create it if needed."""
    try:
        return private_folder(folder, within=cache_folder().parent)
    except (OSError, OutputError) as error:
        raise OutputError(
            f"the cache {folder} cannot be used: {error}. Set XDG_CACHE_HOME to another folder."
        ) from error


def remove_abandoned(path: Path, source: Path) -> None:
    """Remove files that `path`, which was made from the folder `source`, replaces.

    These are files next to `path` of other states of `source`: a name begins with the state and a hyphen. Folders of
    sources that no longer exist are removed, too. A folder holds a link to its source.
    """
    state = path.name.partition("-")[0]
    with _locked(path.parent):
        link = path.parent / SOURCE
        if not link.is_symlink():
            link.symlink_to(source.resolve())
        for other in path.parent.iterdir():
            if other != link and not other.name.startswith((f"{state}-", f".{state}-")):
                other.unlink(missing_ok=True)
    for folder in cache_folder().iterdir():
        if (folder / SOURCE).is_symlink() and not (folder / SOURCE).exists():
            shutil.rmtree(folder, ignore_errors=True)

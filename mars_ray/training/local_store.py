"""The states of a run of one process, in a folder beside its data; only the newest complete one is kept."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class LocalStore:
    """Keeps the newest state; see `CheckpointStore`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def latest(self) -> Iterator[Path | None]:
        """Open the newest whole state, if there is one."""
        kept = sorted(
            (path for path in self._folder.glob("[0-9]*") if not path.suffix), key=lambda path: int(path.name)
        )
        yield kept[-1] if kept else None

    def save(self, write: Callable[[Path], None]) -> None:
        """Write a state and let go of all before, and of what a kill left."""
        before = list(self._folder.glob("[0-9]*"))
        number = 1 + max((int(path.stem) for path in before), default=0)
        partial = self._folder / f"{number}.partial"
        partial.mkdir(parents=True)
        write(partial)
        partial.rename(self._folder / str(number))
        for path in before:
            shutil.rmtree(path)

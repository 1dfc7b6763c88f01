"""The folder of a run, on a disk or in a store: its layout, its lock, and the messages between its processes.

A folder belongs to one driver (a lock, in a store a lease) and one set of settings. The worker of a killed driver runs
on for some seconds, so the worker that writes metrics locks them; in a store it writes them whole each time, and a
later write replaces those of an old worker. An error that a retry would meet again, such as a diverged loss, is written
to `error.json`, and workers that Ray restarts end at once.
"""

import json
import shutil
from collections.abc import Set
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from mars_ray import errors
from mars_ray.data.packed import read_report
from mars_ray.data.source_version import has_changed
from mars_ray.errors import ConfigError, MarsRayError, OutputError
from mars_ray.model.card import CARD_FILE
from mars_ray.model.sources.store import folder_here
from mars_ray.storage.driver_lease import DriverLease, locked
from mars_ray.storage.location import AnyPath, check_reachable, store_errors
from mars_ray.storage.seldom import Seldom
from mars_ray.storage.whole_file import write_file


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self.model = path / "model"
        """The finished model."""
        self._best = path / "best"
        self.train_data = path / "data" / "train"
        self.heldout_data = path / "data" / "heldout"
        self.picture = path / "metrics.png"
        self._settings = path / "settings.json"
        self._stop = path / "STOP"
        self._error = path / "error.json"
        self._store_check = Seldom()
        self._stop_seen = False

    @property
    def finished(self) -> bool:
        """Whether the run is done, which is the case once the card of the finished model exists, because it is written
        last."""
        return (self.model / CARD_FILE).exists()

    def best(self, steps: int) -> AnyPath:
        """Return the folder of the adapter that was the best so far after this number of steps."""
        return self._best / str(steps)

    def keep_best(self, steps: Set[int]) -> None:
        """Remove the adapters that were the best, except those after these numbers of steps."""
        names = {str(number) for number in steps}
        for folder in [path for path in self._best.iterdir() if path.name not in names]:
            if isinstance(folder, Path):
                shutil.rmtree(folder)
            else:
                folder.fs.rm(folder.path, recursive=True)

    def model_here(self) -> Path:
        """Return the folder on this machine that holds the finished model."""
        return folder_here(self.model)

    def only_driver(self) -> AbstractContextManager[None]:
        """Lock the folder against other drivers. Raises `OutputError` if it is locked already, or not writable."""
        if isinstance(self.path, Path):
            return locked(self.path / ".lock", of=self.path)
        check_reachable(self.path)
        return DriverLease(self.path / "driver.json", of=self.path).held()

    @property
    def begun(self) -> bool:
        """Whether the data of the run are ready. From then on, the settings and the data are fixed."""
        return self._settings.exists()

    def keep_settings(self, settings: dict[str, Any]) -> None:
        """Write down the settings of a run whose data are ready."""
        write_file(self._settings, [f"{json.dumps(settings, indent=2)}\n".encode()])

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Raise `ConfigError` if the run began with other settings. Its checkpoints do not contain the settings."""
        before, now = _by_name(json.loads(self._settings.read_text())), _by_name(json.loads(json.dumps(settings)))
        for name in before | now:
            if before.get(name) != now.get(name):
                old, new = (json.dumps(values[name]) if name in values else "not set" for values in (before, now))
                raise ConfigError(
                    f"{self.path} holds a run with other settings: {name} was {old}, now it is {new}. Choose another "
                    "output."
                )

    def check_data(self, source: AnyPath, packed: AnyPath) -> None:
        """Raise `ConfigError` if the file `source` has changed since its records were put into the folder `packed`."""
        report = read_report(packed)
        if report is not None and has_changed(source, report.source):
            raise ConfigError(
                f"{source} has changed since the run in {self.path} began: it had {report.source.bytes:,} bytes and "
                f"the digest {report.source.digest}. Restore the file, or choose another output."
            )

    def begin_attempt(self) -> None:
        """Remove the stop request and the error of an earlier attempt."""
        with store_errors(self.path, OutputError, "Cannot write to", "Choose another output."):
            for path in (self._stop, self._error):
                if path.exists():
                    path.unlink()

    def ask_to_stop(self) -> None:
        """Ask the workers to save and stop after their current step."""
        write_file(self._stop, [])

    def asked_to_stop(self) -> bool:
        """Return whether a stop has been requested; in a store, the answer may be some seconds old."""
        if isinstance(self._stop, Path):
            return self._stop.exists()
        if self._store_check.due:
            # If the store does not answer now, it may at the next check.
            with suppress(Exception), self._store_check.done():
                self._stop_seen = self._stop.exists()
        return self._stop_seen

    def give_up(self, error: MarsRayError) -> None:
        """Record the error that ended a worker. Raises the error itself if it cannot be recorded."""
        try:
            write_file(self._error, [json.dumps({"kind": type(error).__name__, "message": str(error)}).encode()])
        except MarsRayError:
            raise error from None

    @property
    def has_reason(self) -> bool:
        """Whether a worker has recorded the error that ended it."""
        return self._error.exists()

    def raise_reason(self) -> None:
        """Raise the error that ended the workers, if there is one."""
        if self.has_reason:
            reason = json.loads(self._error.read_text())
            raise getattr(errors, reason["kind"])(reason["message"])


def _by_name(settings: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Return the settings that are not null, by their names, such as `objective.adapter.rank`."""
    named: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            named |= _by_name(value, f"{section}{key}.")
        elif value is not None:
            named[section + key] = value
    return named

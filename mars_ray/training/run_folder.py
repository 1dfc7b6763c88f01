"""The folder of a run: what lies where, who may work in it, and the notes its processes leave one another."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mars_ray import errors
from mars_ray.errors import ConfigError, MarsRayError, OutputError
from mars_ray.training.config import TrainConfig


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        """The finished model; it appears whole, so a run that has it is done."""
        self.train_data = path / "data" / "train"
        self.heldout_data = path / "data" / "heldout"
        self.picture = path / "metrics.png"
        self._stop = path / "STOP"
        self._error = path / "error.json"

    @contextmanager
    def only_driver(self) -> Iterator[None]:
        """Keep every other driver out. Raises `OutputError` when one is at work, or nothing can be written here."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise OutputError(f"Cannot write to {self.path}: {error.strerror}. Choose another output.") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutputError(
                    f"Another process is training in {self.path}. Wait for it, or choose another output."
                ) from None
            yield

    def check_settings(self, config: TrainConfig) -> None:
        """Refuse to go on with other settings than the run began with: its checkpoints would not tell."""
        path, settings = self.path / "settings.json", config.model_dump_json(indent=2) + "\n"
        if not path.exists():
            path.write_text(settings)
            return
        for was, now in zip(path.read_text().splitlines(), settings.splitlines(), strict=False):
            if was != now:
                raise ConfigError(
                    f"{self.path} holds a run with other settings: {was.strip(' ,')} there, {now.strip(' ,')} now. "
                    "Choose another output."
                )

    def begin_attempt(self) -> None:
        """Remove the notes of an earlier attempt."""
        self._stop.unlink(missing_ok=True)
        self._error.unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        """Ask the workers to save and stop after their current step."""
        self._stop.touch()

    def asked_to_stop(self) -> bool:
        """Return whether somebody asked."""
        return self._stop.exists()

    def give_up(self, error: MarsRayError) -> None:
        """Leave the reason why the workers gave up."""
        self._error.write_text(json.dumps({"kind": type(error).__name__, "message": str(error)}))

    def raise_reason(self) -> None:
        """Raise the error the workers gave up with, if they did."""
        if self._error.exists():
            reason = json.loads(self._error.read_text())
            raise getattr(errors, reason["kind"])(reason["message"])

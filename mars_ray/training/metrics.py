"""The figures of a run, one JSON line a step, and their picture.

The worker of rank 0 appends, the command line follows the file to show progress, and the plot is made from it: one
record of a run, whoever reads it. A resumed run first drops the lines behind its checkpoint.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure
from upath import UPath

from mars_ray.errors import MarsRayError, RunError
from mars_ray.storage.location import AnyPath
from mars_ray.storage.seldom import Seldom
from mars_ray.storage.whole_file import write_file

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The metrics of one step, a line of the file. What a step did not measure is None."""

    step: int
    """Steps done, this one included."""
    steps: int
    """Steps of the whole run."""
    mask_loss: float | None
    ar_loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    heldout_tokens_per_forward: float | None
    heldout_agreement: float | None
    heldout_agreement_by_offset: list[float] | None
    """For an adapter: share of the first, second … mask of a block that say what the model says."""


class MetricsWriter(Protocol):
    """Writes the metrics of a run; a context manager."""

    def write(self, metrics: StepMetrics) -> None:
        """Add one line."""

    def flush(self) -> None:
        """Have all lines where a process that goes on with the run finds them."""

    def __enter__(self) -> "MetricsWriter": ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


def open_metrics(folder: AnyPath, steps_done: int) -> MetricsWriter:
    """Return the writer of a run that stands at `steps_done`."""
    return (
        LocalMetricsWriter(folder, steps_done) if isinstance(folder, Path) else StoredMetricsWriter(folder, steps_done)
    )


class LocalMetricsWriter:
    """Appends to a file of this machine.

    One writer at a time: the worker of a killed driver lives on for seconds, and the next one waits for its end.
    """

    def __init__(self, folder: Path, steps_done: int) -> None:
        self._file = (folder / METRICS_FILE).open("a+b")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.seek(0)
        kept = _up_to(steps_done, self._file.read())
        self._file.truncate(sum(map(len, kept)))  # lines stand in the order of steps, so those kept come first

    def write(self, metrics: StepMetrics) -> None:
        """Append one line; readers see it at once."""
        self._file.write(_line(metrics))
        self.flush()

    def flush(self) -> None:
        """Hand the lines to the system."""
        self._file.flush()

    def __enter__(self) -> "LocalMetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class StoredMetricsWriter:
    """Writes an object of a store, where nothing can be appended: now and then all lines anew."""

    def __init__(self, folder: UPath, steps_done: int) -> None:
        self._path, self._seldom = folder / METRICS_FILE, Seldom()
        self._lines = _up_to(steps_done, self._path.read_bytes() if self._path.exists() else b"")

    def write(self, metrics: StepMetrics) -> None:
        """Add one line; readers see it some seconds later, or when the writer is closed."""
        self._lines.append(_line(metrics))
        if self._seldom.due:
            with suppress(RunError), self._seldom.done():  # the next time writes this line, too
                self.flush()

    def flush(self) -> None:
        """Write all lines. Raises `RunError` when the store does not take them."""
        write_file(self._path, self._lines)

    def __enter__(self) -> "StoredMetricsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A worker that lost the others may have been given up: the lines of those in its place are newer.
        if kind is None or issubclass(kind, MarsRayError):
            self.flush()


def read_metrics(folder: AnyPath) -> list[StepMetrics]:
    """Return the figures of a run so far; a line that is still being written is left out."""
    return [StepMetrics(**json.loads(line)) for line in _complete((folder / METRICS_FILE).read_bytes())]


def follow_metrics(folder: AnyPath) -> Iterator[StepMetrics | None]:
    """Yield figures as they are written, None when there is no new one. Ends never: the caller stops asking.

    A resumed run drops lines; where the place reached is no longer the end of one, the reading starts over. A store
    that does not answer has nothing new.
    """
    path, position = folder / METRICS_FILE, 0
    while True:
        try:
            content = path.read_bytes() if path.is_file() else b""
        except Exception:  # clients of stores have errors of their own
            if isinstance(path, Path):
                raise
            yield None
            continue
        if content[:position][-1:] != b"\n" or position > len(content):
            position = 0
        for line in _complete(content[position:]):
            position += len(line)
            yield StepMetrics(**json.loads(line))
        yield None


def plot_metrics(metrics: list[StepMetrics], path: AnyPath) -> None:
    """Draw losses, look-ahead, learning rate and gradient norm over the steps as a PNG."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    losses, lookahead, rate, norm = figure.subplots(2, 2, sharex=True).flat
    steps = [each.step for each in metrics]
    losses.plot(steps, [each.ar_loss for each in metrics], label="autoregressive")
    losses.set(title="loss (nats a token)", yscale="log")
    measured = [each for each in metrics if each.heldout_tokens_per_forward is not None]
    if measured:
        losses.plot(steps, [each.mask_loss for each in metrics], label="masks")
        at = [each.step for each in measured]
        lookahead.plot(at, [each.heldout_tokens_per_forward for each in measured], label="tokens per forward")
        agreement = lookahead.twinx()
        for number, line in enumerate(zip(*map(_agreements, measured), strict=False)):
            agreement.plot(at, line, color="tab:green", alpha=0.8**number, label="agreement with AR")
        agreement.set_ylabel("agreement", color="tab:green")
    losses.legend()
    lookahead.set(title="held-out", ylabel="tokens per forward")
    rate.plot(steps, [each.learning_rate for each in metrics])
    rate.set(title="learning rate", xlabel="step")
    norm.plot(steps, [each.grad_norm for each in metrics])
    norm.set(title="gradient norm before clipping", xlabel="step", yscale="log")
    picture = BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    write_file(path, [picture.getvalue()])


def _agreements(metrics: StepMetrics) -> list[float | None]:
    """Return the lines that agreement is drawn as: one, or that of each mask of a block."""
    return list(metrics.heldout_agreement_by_offset or []) or [metrics.heldout_agreement]


def _line(metrics: StepMetrics) -> bytes:
    return json.dumps(asdict(metrics)).encode() + b"\n"


def _up_to(step: int, content: bytes) -> list[bytes]:
    return [line for line in _complete(content) if json.loads(line)["step"] <= step]


def _complete(content: bytes) -> list[bytes]:
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]

"""Record the metrics of a run, one JSON line per step, and plot them.

The worker of rank 0 appends to the file, the command line follows the file to show progress, and the plot is made from
it. A resumed run first drops the lines after its checkpoint.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from upath import UPath

from mars_ray.errors import MarsRayError, RunError
from mars_ray.storage.location import AnyPath
from mars_ray.storage.seldom import Seldom
from mars_ray.storage.whole_file import write_file

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step, which are one line of the file. Values that the step did not measure are None."""

    step: int
    """Steps done, including this one."""
    steps: int
    """Steps of the whole run."""
    mask_loss: float | None
    ar_loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    heldout_tokens_per_forward: float | None
    """Tokens that a forward would yield in exact mode on held-out rows."""
    heldout_agreement: list[float] | None
    """Share of masks that predict the model's own token there, among the first, second, … masks of all blocks."""
    is_best: bool = False
    """Whether this is an adapter, and no earlier measurement found as many tokens per forward."""


class LocalMetricsWriter:
    """Appends lines to a local file.

    A lock allows one writer at a time: the worker of a killed driver lives on for some seconds, and the next writer
    waits until that worker has ended.
    """

    def __init__(self, folder: Path, steps_done: int) -> None:
        self._file = (folder / METRICS_FILE).open("a+b")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.seek(0)
        kept = _up_to(steps_done, self._file.read())
        self._file.truncate(sum(map(len, kept)))  # lines are in order of steps, so the kept ones come first

    def write(self, metrics: StepMetrics) -> None:
        """Append one line, which readers see at once."""
        self._file.write(_line(metrics))
        self.flush()

    def flush(self) -> None:
        """Pass buffered lines to the operating system."""
        self._file.flush()

    def __enter__(self) -> "LocalMetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class StoredMetricsWriter:
    """Writes to an object in a store: rewrites all lines from time to time, because objects cannot be appended to."""

    def __init__(self, folder: UPath, steps_done: int) -> None:
        self._path = folder / METRICS_FILE
        self._seldom = Seldom()
        self._lines = _up_to(steps_done, self._path.read_bytes() if self._path.exists() else b"")

    def write(self, metrics: StepMetrics) -> None:
        """Add one line, which readers see some seconds later or once the writer is closed."""
        self._lines.append(_line(metrics))
        if self._seldom.due:
            with suppress(RunError), self._seldom.done():  # the next write includes this line
                self.flush()

    def flush(self) -> None:
        """Write all lines. Raises `RunError` if the store refuses them."""
        write_file(self._path, self._lines)

    def __enter__(self) -> "StoredMetricsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Another error may mean that other workers have replaced this one; then their lines are newer.
        if kind is None or issubclass(kind, MarsRayError):
            self.flush()


def open_metrics(folder: AnyPath, steps_done: int) -> LocalMetricsWriter | StoredMetricsWriter:
    """Return the writer of a run that has done `steps_done` steps."""
    if isinstance(folder, Path):
        return LocalMetricsWriter(folder, steps_done)
    return StoredMetricsWriter(folder, steps_done)


def read_metrics(folder: AnyPath) -> list[StepMetrics]:
    """Return the metrics of a run so far, without an incomplete last line."""
    return [StepMetrics(**json.loads(line)) for line in _complete((folder / METRICS_FILE).read_bytes())]


def follow_metrics(folder: AnyPath) -> Iterator[StepMetrics | None]:
    """Yield the metrics of each new step, or None if there is no new step. The iterator is endless.

    A resumed run drops lines, so reading starts again if the current position is no longer the end of a line. A store
    that does not answer counts as having no new step.
    """
    path = folder / METRICS_FILE
    position = 0
    while True:
        try:
            content = path.read_bytes() if path.is_file() else b""
        except Exception:  # each store has its own errors
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
    """Plot losses, lookahead, learning rate and gradient norm against the step, as a PNG."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    losses, lookahead, rate, norm = figure.subplots(2, 2, sharex=True).flat
    steps = [line.step for line in metrics]
    losses.plot(steps, [line.ar_loss for line in metrics], label="autoregressive")
    losses.set(title="loss (nats per token)", yscale="log")
    measured = [line for line in metrics if line.heldout_tokens_per_forward is not None]
    if measured:
        losses.plot(steps, [line.mask_loss for line in metrics], label="masks")
        measured_steps = [line.step for line in measured]
        lookahead.plot(
            measured_steps, [line.heldout_tokens_per_forward for line in measured], label="tokens per forward"
        )
        agreement = lookahead.twinx()
        for best in [line for line in measured if line.is_best][-1:]:
            lookahead.plot(best.step, best.heldout_tokens_per_forward, "o", label=f"best, kept: step {best.step}")
            lookahead.legend()
        for number, shares in enumerate(zip(*(line.heldout_agreement or [] for line in measured), strict=True)):
            agreement.plot(measured_steps, shares, color="tab:green", alpha=0.8**number, label="agreement with AR")
        agreement.set_ylabel("agreement", color="tab:green")
    losses.legend()
    lookahead.set(title="held-out", ylabel="tokens per forward")
    rate.plot(steps, [line.learning_rate for line in metrics])
    rate.set(title="learning rate", xlabel="step")
    norm.plot(steps, [line.grad_norm for line in metrics])
    norm.set(title="gradient norm before clipping", xlabel="step", yscale="log")
    picture = BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    write_file(path, [picture.getvalue()])


def _line(metrics: StepMetrics) -> bytes:
    return json.dumps(asdict(metrics)).encode() + b"\n"


def _up_to(step: int, content: bytes) -> list[bytes]:
    return [line for line in _complete(content) if json.loads(line)["step"] <= step]


def _complete(content: bytes) -> list[bytes]:
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]

"""Show the progress of a generate job on standard error.

A terminal shows a bar, metrics and a line for each worker. Any other output gets a plain line every ten seconds, which
does not list the workers.
"""

import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mars_ray.batch.output.report import JobMetrics, WorkerMetrics
from mars_ray.progress import Display

NAME = "generate"
STARTING = "starting workers, which load the model"
BAR_WIDTH = 40


class JobProgress(Display):
    """Progress display of a job. Use it as a context manager."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics: JobMetrics | None = None
        super().__init__(clock)

    def update(self, metrics: JobMetrics) -> None:
        """Show metrics. The first metrics, and any new note, are shown at once."""
        first = self._metrics is None
        last_note = "" if self._metrics is None else self._metrics.note
        self._metrics = metrics
        if metrics.note and metrics.note != last_note:
            self.say(f"{NAME}: {metrics.note}")
        if first:
            self.show_now()
        self.refresh()

    def picture(self) -> RenderableType:
        """Return the bar, the metrics, the note and the workers, for a terminal."""
        metrics = self._metrics
        if metrics is None:
            return Text(f"{NAME}: {STARTING}")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            NAME,
            ProgressBar(total=metrics.total, completed=metrics.done, width=BAR_WIDTH),
            Text(_rows(metrics), style="progress.percentage"),
            Text(_left(metrics), style="progress.remaining"),
        )
        parts: list[RenderableType] = [bar, Text("  ".join(_figures(metrics)))]
        if metrics.note:
            parts.append(Text(metrics.note, style="yellow"))
        if metrics.workers:
            parts.append(_table(metrics.workers))
        return Group(*parts)

    def line(self) -> str:
        """Return the number of rows, the metrics and the time left in one line."""
        if self._metrics is None:
            return f"{NAME}: {STARTING}"
        return f"{NAME}: " + "  ".join([_rows(self._metrics), *_figures(self._metrics), _left(self._metrics)])


def _rows(metrics: JobMetrics) -> str:
    return f"{metrics.done:,}/{metrics.total:,}"


def _left(metrics: JobMetrics) -> str:
    return f"ETA {'-' if metrics.eta_s is None else timedelta(seconds=round(metrics.eta_s))}"


def _figures(metrics: JobMetrics) -> list[str]:
    figures = [f"{metrics.running:,} running", f"{metrics.tokens:,} tokens"]
    if metrics.tokens_per_s is not None:
        figures.append(f"{metrics.tokens_per_s:,.0f} tokens/s")
    if metrics.tokens_per_forward is not None:
        figures.append(f"{metrics.tokens_per_forward:.2f} tokens/forward")
    if metrics.threshold is not None:
        figures.append(f"threshold {metrics.threshold:.3g}")
    return [*figures, f"errors {metrics.errors:,}"]


def _table(workers: tuple[WorkerMetrics, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("worker")
    for heading in ("rows", "running", "tokens/s", "tokens/forward"):
        table.add_column(heading, justify="right")
    for worker in workers:
        table.add_row(
            Text(worker.name),
            f"{worker.rows:,}",
            f"{worker.running:,}",
            f"{worker.tokens_per_s:,.0f}",
            "-" if worker.tokens_per_forward is None else f"{worker.tokens_per_forward:.2f}",
        )
    return table

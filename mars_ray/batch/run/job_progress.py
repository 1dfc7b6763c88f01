"""A generate job while it runs, as a person sees it.

In:    the figures of the job, now and then.
Out:   a bar, figures and a line for each worker on a terminal; plain lines without the workers elsewhere.
Never: writes to standard output.
"""

import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mars_ray.batch.output.report import JobFigures, WorkerFigures
from mars_ray.progress import Display

NAME = "generate"
BAR_WIDTH = 40


class JobProgress(Display):
    """Shows how far a job is; use as a context manager."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._figures: JobFigures | None = None
        self._phase = "starting"
        super().__init__(clock)

    def phase(self, phase: str) -> None:
        """Say what goes on before there are figures; what is new is shown at once."""
        if phase != self._phase:
            self._phase = phase
            if self._figures is None:
                self.say(f"{NAME}: {phase}")
        self.refresh()

    def update(self, figures: JobFigures) -> None:
        """Say how the job stands; a new note is shown at once."""
        said, first = "" if self._figures is None else self._figures.note, self._figures is None
        self._figures = figures
        if figures.note and figures.note != said:
            self.say(f"{NAME}: {figures.note}")
        if first:
            self.show_now()
        self.refresh()

    def picture(self) -> RenderableType:
        """Draw bar, figures, note and workers."""
        figures = self._figures
        if figures is None:
            return Text(f"{NAME}: {self._phase}")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            NAME,
            ProgressBar(total=figures.total, completed=figures.done, width=BAR_WIDTH),
            Text(_rows(figures), style="progress.percentage"),
            Text(_left(figures), style="progress.remaining"),
        )
        parts: list[RenderableType] = [bar, Text("  ".join(_said(figures)))]
        if figures.note:
            parts.append(Text(figures.note, style="yellow"))
        if figures.workers:
            parts.append(_table(figures.workers))
        return Group(*parts)

    def line(self) -> str:
        """Say rows, figures and the time left in one line."""
        if self._figures is None:
            return f"{NAME}: {self._phase}"
        return f"{NAME}: " + "  ".join([_rows(self._figures), *_said(self._figures), _left(self._figures)])


def _rows(figures: JobFigures) -> str:
    return f"{figures.done:,}/{figures.total:,}"


def _left(figures: JobFigures) -> str:
    return f"ETA {'-' if figures.eta_s is None else timedelta(seconds=round(figures.eta_s))}"


def _said(figures: JobFigures) -> list[str]:
    said = [f"{figures.running:,} under way", f"{figures.tokens:,} tokens"]
    if figures.tokens_per_s is not None:
        said.append(f"{figures.tokens_per_s:,.0f} tokens/s")
    if figures.tokens_per_forward is not None:
        said.append(f"{figures.tokens_per_forward:.2f} tokens/forward")
    if figures.threshold is not None:
        said.append(f"threshold {figures.threshold:.3g}")
    return [*said, f"errors {figures.errors:,}"]


def _table(workers: tuple[WorkerFigures, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("worker")
    for heading in ("rows", "under way", "tokens/s", "tokens/forward"):
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

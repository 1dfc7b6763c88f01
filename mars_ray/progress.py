"""Progress of long work: a rich bar on a terminal, a plain line every ten seconds elsewhere.

Everything goes to standard error, so that standard output holds results only.
"""

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_LINE_EVERY_S = 10.0


class ProgressLine:
    """Shows how far one piece of work is; use as a context manager."""

    def __init__(self, what: str, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._clock = what, total, clock
        self._console = Console(stderr=True)
        self._started_s = self._printed_s = clock()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task(what, total=total, note="")
        self._last = (0, "")

    def __enter__(self) -> "ProgressLine":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def update(self, done: int, figures: Mapping[str, object], total: int | None = None) -> None:
        """Say how much is done, of how much once that is known; `figures` are shown as `name value`."""
        note = "  ".join(f"{name} {value}" for name, value in figures.items())
        self._last = (done, note)
        self._total = total or self._total
        self._bar.update(self._task, completed=done, total=self._total, note=note)
        if not self._console.is_terminal and self._clock() - self._printed_s >= PLAIN_LINE_EVERY_S:
            self._print_plain()

    def _print_plain(self) -> None:
        done, note = self._last
        self._printed_s = self._clock()
        total = "" if self._total is None else f"/{self._total}"
        elapsed_s = self._printed_s - self._started_s
        self._console.print(f"{self._what}: {done}{total}  {note}  {elapsed_s:.0f} s", highlight=False, soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()
        else:
            self._print_plain()

"""Show progress on standard error: a live picture on a terminal, or else a plain line every ten seconds."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_LINE_EVERY_S = 10.0
SPEED_WINDOW = 64
"""Number of recent updates over which the speed is averaged to estimate the time left."""


class _ErrorConsole(Console):
    """Standard error. When its reader is gone, nothing is shown any more, and the work goes on."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """Show nothing any more. By default, rich would end the thread and discard standard output."""
        self.quiet = True


class Display(ABC):
    """A progress display. Use it as a context manager, and call `refresh` after changes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._console = _ErrorConsole()
        self._live = Live(console=self._console, get_renderable=self.picture)
        self._started_s = self._printed_s = clock()

    @abstractmethod
    def picture(self) -> RenderableType:
        """Return the picture to show on a terminal. It is called several times per second in another thread."""

    @abstractmethod
    def line(self) -> str:
        """Return the progress in one line."""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def refresh(self) -> None:
        """Print a plain line if it is due. On a terminal, the picture refreshes itself."""
        if not self._console.is_terminal and self._clock() - self._printed_s >= PLAIN_LINE_EVERY_S:
            self._print_line()

    def show_now(self) -> None:
        """Print a plain line now, except on a terminal."""
        if not self._console.is_terminal:
            self._print_line()

    def say(self, line: str) -> None:
        """Print a message, except on a terminal."""
        if not self._console.is_terminal:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _print_line(self) -> None:
        self._printed_s = self._clock()
        self.say(f"{self.line()}  {self._printed_s - self._started_s:.0f} s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._print_line()


class ProgressLine(Display):
    """A progress bar that shows figures and the time left at the recent speed."""

    def __init__(self, title: str, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        self._bar = Progress(*columns, TimeElapsedColumn())
        self._task = self._bar.add_task(title, total=total, note="")
        self._title = title
        self._total = total
        self._last = (0, "")
        self._updates: deque[tuple[float, int]] = deque(maxlen=SPEED_WINDOW)
        super().__init__(clock)

    def update(self, done: int, figures: Mapping[str, object], total: int | None = None) -> None:
        """Show the number of finished items, and the total once it is known. `figures` are shown as `name value`."""
        self._total = total or self._total
        self._updates.append((self._clock(), done))
        notes = [f"{name} {value}" for name, value in figures.items()]
        note = "  ".join(notes + self._time_left())
        self._last = (done, note)
        self._bar.update(self._task, completed=done, total=self._total, note=note)
        self.refresh()

    def _time_left(self) -> list[str]:
        """Return the time left at the speed of the recent updates, or an empty list if it is unknown."""
        first_s, first = self._updates[0]
        last_s, done = self._updates[-1]
        if self._total is None or not first < done < self._total:
            return []
        left_s = (self._total - done) * (last_s - first_s) / (done - first)
        return [f"about {_duration(left_s)} left"]

    def picture(self) -> RenderableType:
        """Return the progress bar."""
        return self._bar

    def line(self) -> str:
        """Return the number of finished items, the total and the figures in one line."""
        done, note = self._last
        total = "" if self._total is None else f"/{self._total}"
        return f"{self._title}: {done}{total}  {note}"


def _duration(seconds: float) -> str:
    """Return a duration as text: in seconds, in minutes, or in hours and minutes."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"

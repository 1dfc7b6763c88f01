"""Show races: as columns replayed side by side on a terminal, and as plain lines elsewhere."""

import time
from collections.abc import Callable, Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mars_ray.demo.race import Lane, Race

TINTS = ("black on #a6d8ff", "black on #ffd59e", "black on #b9e8b0", "black on #e3c4ff")
"""Colours for the text of successive forwards, used in rotation, so that a change of colour marks the next forward."""
TITLES = {"ar": "ar: one token at a time", "exact": "exact: the same tokens, sooner"}
FRAME = 4
"""Characters of a column's width that the frame and its padding take up."""
FAIR = "Each setting decoded alone on the machine, in turns, and read the prompt itself."
EXPLANATION = f"{FAIR} A change of colour marks the next forward."
PICTURES_PER_S = 20
SHOWN_S = 6.0
"""Minimum seconds for which a race is shown, so that viewers can follow it; a shorter race is slowed down."""
AROUND = 9
"""Terminal lines reserved around an answer, with room for a question of three lines."""
LINES_MIN = 4


def show_races(
    races: Iterable[Race], label: str, console: Console, clock: Callable[[], float] = time.monotonic
) -> list[Race]:
    """Print the label, each race as soon as it has run, and an explanation; return the races."""
    console.print(label, highlight=False)
    shown = []
    for race in races:
        shown.append(race)
        if console.is_terminal:
            _replay(race, console, clock)
            console.print(picture(race, race.last_s, console))
        else:
            for line in plain_lines(race):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(EXPLANATION if console.is_terminal else FAIR, style="dim", soft_wrap=True)
    return shown


def picture(race: Race, at_s: float, console: Console, lines: int | None = None) -> RenderableType:
    """Draw the race `at_s` seconds after its start, with the last `lines` lines of every answer."""
    width = console.width // len(race.lanes)
    answers = [_wrapped(lane, console, width) for lane in race.lanes]
    height = max(len(answer) for answer in answers)
    if lines is not None:
        height = min(height, lines)
    columns = Table.grid(expand=False)
    cells = []
    for lane, answer in zip(race.lanes, answers, strict=True):
        columns.add_column(width=width)
        shown = _wrapped(lane.until(at_s), console, width)[-height:] if at_s < lane.seconds else answer[-height:]
        body = Text("\n").join(shown)
        panel = Panel(body, title=TITLES.get(lane.setting, lane.setting), height=height + 2, width=width)
        cells.append(Group(panel, _figures(lane, at_s)))
    columns.add_row(*cells)
    question = Text.assemble((race.prompt.workload, "bold"), "  ", (race.prompt.question, "dim"))
    return Group(question, columns)


def plain_lines(race: Race) -> list[str]:
    """Return the question, the figures of each setting, and the distinct answers."""
    lines = [f"{race.prompt.workload}: {race.prompt.question}"]
    for lane in race.lanes:
        lines.append(
            f"  {lane.setting}: {lane.tokens} tokens, {lane.seconds:.2f} s, {lane.tokens_per_s:,.0f} tokens/s, "
            f"{lane.tokens_per_forward:.2f} per forward"
        )
    for text in dict.fromkeys(lane.text for lane in race.lanes):
        names = " and ".join(lane.setting for lane in race.lanes if lane.text == text)
        lines.append(f"  {names} answered: {text}")
    return lines


def _replay(race: Race, console: Console, clock: Callable[[], float]) -> None:
    slowdown = max(1.0, SHOWN_S / race.last_s)
    started_s = clock()
    lines = max(LINES_MIN, console.height - AROUND)

    def current_picture() -> RenderableType:
        at_s = (clock() - started_s) / slowdown
        note = Text(f"shown {slowdown:.1f} times slower than measured", style="dim")
        return Group(picture(race, at_s, console, lines), note)

    with Live(console=console, transient=True, refresh_per_second=PICTURES_PER_S, get_renderable=current_picture):
        while clock() - started_s < race.last_s * slowdown:
            time.sleep(1 / PICTURES_PER_S)


def _wrapped(lane: Lane, console: Console, width: int) -> list[Text]:
    text = Text()
    for number, chunk in enumerate(lane.chunks):
        text.append(chunk.text, TINTS[number % len(TINTS)])
    return list(text.wrap(console, width - FRAME))


def _figures(lane: Lane, at_s: float) -> Text:
    partial = lane.until(at_s)
    seconds = f"{partial.seconds:.2f} s" + ("" if at_s < lane.seconds else ", done")
    speed = f"{partial.tokens / partial.seconds:,.0f}" if partial.seconds else "0"
    return Text.assemble(
        "  ",
        (speed, "bold"),
        " tokens/s, ",
        (f"{partial.tokens_per_forward:.2f}", "bold"),
        f" per forward\n  {seconds}\n",
    )

"""A race at one moment as a picture: columns side by side, tokens tinted by the forward that gave them."""

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mars_ray.race.lanes import Lane, Race

TINTS = ("black on #a6d8ff", "black on #ffd59e", "black on #b9e8b0", "black on #e3c4ff")
"""Forwards take these in turns, so that where a colour ends another forward began."""
TITLES = {"ar": "ar: one token at a time", "exact": "exact: the same tokens, sooner"}
FRAME = 4
"""Characters of a column's width that are frame and space."""
HOW = (
    "Each was decoded alone on the machine, in turns, and read the prompt itself; side by side they stand at the speed "
    "that was measured. One tint is one forward."
)


def picture(race: Race, at_s: float, console: Console, lines: int | None = None) -> RenderableType:
    """Draw what there was so many seconds after the question was asked, the last `lines` of every answer."""
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


def _wrapped(lane: Lane, console: Console, width: int) -> list[Text]:
    text = Text()
    for number, chunk in enumerate(lane.chunks):
        text.append(chunk.text, TINTS[number % len(TINTS)])
    return list(text.wrap(console, width - FRAME))


def _figures(lane: Lane, at_s: float) -> Text:
    now = lane.until(at_s)
    seconds = f"{now.seconds:.2f} s" + ("" if at_s < lane.seconds else ", done")
    speed = f"{now.tokens / now.seconds:,.0f}" if now.seconds else "0"
    return Text.assemble(
        "  ", (speed, "bold"), " tokens/s, ", (f"{now.tokens_per_forward:.2f}", "bold"), f" per forward\n  {seconds}\n"
    )

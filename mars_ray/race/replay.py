"""Show races: live on a terminal, in plain lines elsewhere."""

import time
from collections.abc import Callable, Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from mars_ray.race.lanes import Race
from mars_ray.race.picture import HOW, picture

PICTURES_PER_S = 20
SHOWN_S = 6.0
"""Seconds in which an eye can follow a race; one that was shorter is shown slower."""
AROUND = 9
"""Lines of a terminal that are not of an answer, with room for a question of three lines."""
LINES_MIN = 4


def show(
    races: Iterable[Race], label: str, console: Console, clock: Callable[[], float] = time.monotonic
) -> list[Race]:
    """Show each race as soon as it was run, `label` before and how it was done behind; return them."""
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
    console.print(HOW, style="dim", soft_wrap=True)
    return shown


def _replay(race: Race, console: Console, clock: Callable[[], float]) -> None:
    slower, started_s = max(1.0, SHOWN_S / race.last_s), clock()
    lines = max(LINES_MIN, console.height - AROUND)

    def now() -> RenderableType:
        at_s = (clock() - started_s) / slower
        return Group(
            picture(race, at_s, console, lines), Text(f"shown {slower:.1f} times slower than it was", style="dim")
        )

    with Live(console=console, transient=True, refresh_per_second=PICTURES_PER_S, get_renderable=now):
        while clock() - started_s < race.last_s * slower:
            time.sleep(1 / PICTURES_PER_S)


def plain_lines(race: Race) -> list[str]:
    """Return the question, what each setting gave and at which speed, and the answers."""
    said = [f"{race.prompt.workload}: {race.prompt.question}"]
    for lane in race.lanes:
        said.append(
            f"  {lane.setting}: {lane.tokens} tokens, {lane.seconds:.2f} s, {lane.tokens_per_s:,.0f} tokens/s, "
            f"{lane.tokens_per_forward:.2f} per forward"
        )
    for text in dict.fromkeys(lane.text for lane in race.lanes):
        names = " and ".join(lane.setting for lane in race.lanes if lane.text == text)
        said.append(f"  {names} said: {text}")
    return said

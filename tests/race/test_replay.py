"""Races are shown live on a terminal, and in lines elsewhere."""

import io
from itertools import count

from rich.console import Console

from mars_ray.race.replay import show
from tests.race.race_samples import RACE


def test_without_a_terminal_there_are_plain_lines_and_equal_answers_are_said_once() -> None:
    out = io.StringIO()
    assert show([RACE], "a model", Console(file=out)) == [RACE]
    lines = out.getvalue().splitlines()
    assert lines[:5] == [
        "a model",
        "general: Count to three.",
        "  ar: 3 tokens, 4.00 s, 1 tokens/s, 1.00 per forward",
        "  exact: 3 tokens, 2.00 s, 2 tokens/s, 1.50 per forward",
        "  ar and exact said: one two three",
    ]
    assert "decoded alone on the machine, in turns" in lines[5]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_a_short_race_is_slowed_down_and_says_so() -> None:
    out, seconds = io.StringIO(), count()
    show([RACE], "a model", Console(file=out, force_terminal=True, width=80), clock=lambda: float(next(seconds)))
    assert "shown 1.5 times slower than it was" in out.getvalue()  # 4 s in 6
    last = out.getvalue().rpartition("Count to three.")[2]
    assert last.count("done") == 2
    assert "slower" not in last

"""Races are drawn tinted by forward, replayed on a terminal, and printed as lines elsewhere."""

import io
from itertools import count

from rich.console import Console

from mars_ray.demo.show import picture, show_races
from tests.demo.race_samples import AHEAD, ALONE, RACE


def drawn(at_s: float, **how: int) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(picture(RACE, at_s, console, **how))
    return console.export_text()


def test_a_lane_until_a_moment_has_what_forwards_gave_by_then() -> None:
    now = ALONE.until(2.5)
    assert (now.text, now.tokens, now.forwards, now.seconds) == ("one two ", 2, 2, 2.5)
    assert ALONE.until(9.0) == ALONE
    assert (ALONE.until(0.5).text, ALONE.until(0.5).tokens_per_forward) == ("", 1.0)


def test_answers_stand_side_by_side_as_far_as_they_are() -> None:
    at_first = drawn(RACE.first_s)
    assert "│ one two                              ││ one two three" in at_first
    assert "1 tokens/s, 1.00 per forward" in at_first  # 2 tokens in 2 s
    assert "2 tokens/s, 1.50 per forward" in at_first  # 3 in 2 s, by 2 forwards
    assert at_first.count("done") == 1
    at_last = drawn(RACE.last_s)
    assert at_last.count("one two three") == 2
    assert at_last.count("done") == 2


def test_the_picture_does_not_grow_while_it_runs() -> None:
    assert len({len(drawn(at_s).splitlines()) for at_s in (0.0, 1.0, 2.0, 4.0)}) == 1


def test_a_terminal_that_is_too_low_shows_the_end_of_an_answer() -> None:
    console = Console(width=30, file=io.StringIO(), record=True)  # 11 characters for an answer
    console.print(picture(RACE, 4.0, console, lines=1))
    assert "│ three       │" in console.export_text()


def test_tokens_of_a_forward_have_one_tint_and_the_next_forward_has_another() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    tints = [
        (segment.text.strip(), segment.style.bgcolor)
        for segment in console.render(picture(RACE, 2.0, console))
        if segment.style and segment.style.bgcolor and segment.text.strip()
    ]
    assert [text for text, _ in tints] == ["one", "two", "one two", "three"]
    alone, ahead = [tint for _, tint in tints[:2]], [tint for _, tint in tints[2:]]
    assert alone[0] != alone[1]
    assert ahead[0] != ahead[1]
    assert AHEAD.forwards == 2


def test_without_a_terminal_there_are_plain_lines_and_equal_answers_are_said_once() -> None:
    out = io.StringIO()
    assert show_races([RACE], "a model", Console(file=out)) == [RACE]
    lines = out.getvalue().splitlines()
    assert lines[:5] == [
        "a model",
        "general: Count to three.",
        "  ar: 3 tokens, 4.00 s, 1 tokens/s, 1.00 per forward",
        "  exact: 3 tokens, 2.00 s, 2 tokens/s, 1.50 per forward",
        "  ar and exact answered: one two three",
    ]
    assert "decoded alone on the machine, in turns" in lines[5]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_a_short_race_is_slowed_down_and_says_so() -> None:
    out, seconds = io.StringIO(), count()
    show_races([RACE], "a model", Console(file=out, force_terminal=True, width=80), clock=lambda: float(next(seconds)))
    assert "shown 1.5 times slower than measured" in out.getvalue()  # 4 s in 6
    last = out.getvalue().rpartition("Count to three.")[2]
    assert last.count("done") == 2
    assert "slower" not in last

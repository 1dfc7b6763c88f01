"""Progress without a terminal: plain lines, not too many."""

import pytest

from mars_ray.progress import ProgressLine


def test_without_a_terminal_a_line_comes_every_ten_seconds_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 4.0, 4.0, 10.0, 10.0, 10.0, 12.0, 12.0, 13.0])
    with ProgressLine("train", total=None, clock=lambda: next(now)) as progress:
        progress.update(1, {"loss": 3})
        progress.update(2, {"loss": 2}, total=5)
        progress.update(5, {"loss": 1})
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["train: 2/5  loss 2  about 18 s left  10 s", "train: 5/5  loss 1  13 s"]


@pytest.mark.parametrize(
    ("speed_s", "total", "left"),
    [(1.0, 100, "about 48 s left"), (6.0, 100, "about 5 min left"), (60.0, 200, "about 2 h 28 min left")],
)
def test_the_time_left_follows_the_speed_of_late_and_not_what_an_earlier_run_did(
    speed_s: float, total: int, left: str
) -> None:
    now = 0.0
    line = ProgressLine("train", total=None, clock=lambda: now)
    for done in range(50, 53):
        now += speed_s
        line.update(done, {}, total=total)
    assert line.line() == f"train: 52/{total}  {left}"


def test_no_time_left_is_said_before_there_is_a_speed_and_after_the_end() -> None:
    now = 0.0
    line = ProgressLine("train", total=3, clock=lambda: now)
    line.update(1, {"loss": 2})
    assert line.line() == "train: 1/3  loss 2"
    now = 1.0
    line.update(3, {"loss": 1})
    assert line.line() == "train: 3/3  loss 1"

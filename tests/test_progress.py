"""Progress without a terminal: plain lines, not too many."""

import pytest

from mars_ray.progress import ProgressLine


def test_without_a_terminal_a_line_comes_every_ten_seconds_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 4.0, 10.0, 10.0, 12.0, 13.0])
    with ProgressLine("train", total=None, clock=lambda: next(now)) as progress:
        progress.update(1, {"loss": 3})
        progress.update(2, {"loss": 2}, total=5)
        progress.update(5, {"loss": 1})
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["train: 2/5  loss 2  10 s", "train: 5/5  loss 1  13 s"]

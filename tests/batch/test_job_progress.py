"""A job as a person sees it: lines without a terminal, a picture on one."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from mars_ray.batch.output.report import JobMetrics, WorkerMetrics
from mars_ray.batch.run.job_progress import JobProgress


def figures(done: int, total: int = 2000, threshold: float | None = 0.85, note: str = "") -> JobMetrics:
    return JobMetrics(
        done=done,
        total=total,
        errors=3,
        running=32,
        tokens=48_123,
        tokens_per_s=5230.4,
        tokens_per_forward=2.416,
        threshold=threshold,
        eta_s=723.4 if done else None,
        note=note,
        workers=(
            WorkerMetrics(name="worker [0]", rows=611, running=16, tokens_per_s=2614.2, tokens_per_forward=2.395),
        ),
    )


def clock_of(*readings: float) -> Callable[[], float]:
    left = iter(readings)
    return lambda: next(left)


def test_without_a_terminal_a_job_says_its_first_figures_at_once_then_a_line_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with JobProgress(clock_of(0, 1, 1, 11, 11, 12, 13)) as progress:
        progress.update(figures(0))
        progress.update(figures(1200))
        progress.update(figures(2000, threshold=None))
    shown = capsys.readouterr()
    assert shown.out == ""
    rate = "32 running  48,123 tokens  5,230 tokens/s  2.42 tokens/forward"
    assert shown.err.splitlines() == [
        f"generate: 0/2,000  {rate}  threshold 0.85  errors 3  ETA -  1 s",
        f"generate: 1,200/2,000  {rate}  threshold 0.85  errors 3  ETA 0:12:03  11 s",
        f"generate: 2,000/2,000  {rate}  errors 3  ETA 0:12:03  13 s",
    ]


def test_a_note_is_said_once_and_again_only_when_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    with JobProgress(lambda: 0.0) as progress:
        for note in ("", "late [by] 1 h", "late [by] 1 h", "", "late"):
            progress.update(figures(1, note=note))
    said = [line for line in capsys.readouterr().err.splitlines() if "late" in line]
    assert said == ["generate: late [by] 1 h", "generate: late"]


def test_a_job_that_ends_before_its_first_figures_says_that_it_was_starting(capsys: pytest.CaptureFixture[str]) -> None:
    with JobProgress(lambda: 0.0):
        pass
    assert capsys.readouterr().err == "generate: starting workers, which load the model  0 s\n"


def test_what_is_not_known_yet_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    first = replace(figures(0, threshold=None), tokens_per_s=None, tokens_per_forward=None)
    with JobProgress(lambda: 0.0) as progress:
        progress.update(first)
    assert capsys.readouterr().err.splitlines()[0] == (
        "generate: 0/2,000  32 running  48,123 tokens  errors 3  ETA -  0 s"
    )


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_figures_note_and_every_worker_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with JobProgress() as progress:
        progress.update(figures(1200, note="late [by] 1 h"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\x1b[" in shown.err
    for part in ("━", "1,200/2,000", "ETA 0:12:03", "5,230 tokens/s", "0.85", "late [by] 1 h", "worker [0]", "2,614"):
        assert part in shown.err


@pytest.mark.usefixtures("terminal")
def test_a_job_without_rows_and_without_an_estimate_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with JobProgress() as progress:
        progress.update(figures(0, total=0))
    shown = capsys.readouterr().err
    assert "0/0" in shown
    assert "ETA -" in shown

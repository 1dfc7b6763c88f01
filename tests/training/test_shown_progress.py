"""What a training run shows on standard error while it runs, and when Ray ends it."""

from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import ControllerError

from mars_ray.progress import ProgressLine
from mars_ray.ray_private import reason_of
from mars_ray.training.metrics import open_metrics
from mars_ray.training.ray_trainer import _show_progress
from mars_ray.training.run_folder import RunFolder
from tests.training.test_metrics import step

ADVICE = "Refer to the documentation on how to address the out of memory issue."


def test_a_resumed_run_shows_no_steps_of_before_and_no_time_from_their_speed(tmp_path: Path) -> None:
    with open_metrics(tmp_path, 0) as writer:
        for number in range(1, 6):
            writer.write(step(number))
    shown: list[int] = []
    ended = Event()

    class Line(ProgressLine):
        def update(self, done: int, figures: Mapping[str, object], total: int | None = None) -> None:
            shown.append(done)
            ended.set()

    run = Thread(target=ended.wait)
    run.start()
    _show_progress(RunFolder(tmp_path), Line("train", total=None), run, Event())
    assert shown == [5]


@pytest.mark.parametrize("kind", [OutOfMemoryError, lambda text: ControllerError(OutOfMemoryError(text))])
def test_a_run_whose_workers_ended_for_lack_of_memory_says_so(kind: type[Exception]) -> None:
    text = f"4 worker(s) were killed due to the node running low on memory. Memory was 22GB / 23GB\n[...]\n{ADVICE}"
    assert reason_of(kind(text)) == text.splitlines()[0]


def test_the_reason_of_another_error_is_its_last_line() -> None:
    assert reason_of(RayActorError(error_msg="Traceback\n  File\nValueError: no.")) == "ValueError: no"

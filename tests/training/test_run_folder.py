"""The folder of a run: why it ended, and which adapters it keeps."""

from pathlib import Path

import pytest

from mars_ray.errors import DivergedError
from mars_ray.training.run_folder import RunFolder


def test_the_reason_of_a_worker_is_raised_until_the_next_attempt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.give_up(DivergedError("Step 2 of 9: the loss is nan."))
    assert folder.has_reason
    with pytest.raises(DivergedError, match="Step 2 of 9"):
        folder.raise_reason()
    folder.begin_attempt()
    assert not folder.has_reason
    folder.raise_reason()


def test_a_reason_that_cannot_be_written_down_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DivergedError, match="Step 2 of 9"):
        RunFolder(tmp_path / "file" / "run").give_up(DivergedError("Step 2 of 9: the loss is nan."))


def test_the_best_adapters_of_the_last_two_states_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for steps in (4, 8, 12):
        folder.best(steps).mkdir(parents=True)
    folder.keep_best({8, 12})
    assert {path.name for path in (tmp_path / "best").iterdir()} == {"8", "12"}

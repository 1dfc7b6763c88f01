"""States in a folder: the newest whole one counts, whatever a kill left beside it."""

from functools import partial
from pathlib import Path

import pytest

from pipelines.reproduction.training import LocalStore


def write(text: str, folder: Path) -> None:
    (folder / "state").write_text(text)


def latest(store: LocalStore) -> str | None:
    with store.latest() as folder:
        return None if folder is None else (folder / "state").read_text()


def test_a_new_run_has_no_state(tmp_path: Path) -> None:
    assert latest(LocalStore(tmp_path / "states")) is None


def test_the_newest_state_takes_the_place_of_those_before(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in range(12):
        store.save(partial(write, str(number)))
        assert latest(store) == str(number)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_state_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.save(lambda folder: write("whole", folder))

    def dies(folder: Path) -> None:
        write("half", folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(dies)
    assert latest(store) == "whole"
    store.save(lambda folder: write("next", folder))
    assert latest(store) == "next"
    assert len(list(tmp_path.iterdir())) == 1

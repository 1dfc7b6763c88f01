"""The cache of converted models: each is made once and whole, whoever asks, and whatever was killed."""

import threading
from pathlib import Path

import pytest

from mars_ray.errors import OutputError
from mars_ray.model.checkpoint import save_folder
from mars_ray.model.sources.cache import made_once, scratch_for


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mars-ray" / "models"


def test_of_several_that_ask_at_once_one_makes_it(cache: Path) -> None:
    made: list[Path] = []
    both = threading.Barrier(2)

    def write(partial: Path) -> None:
        (partial / "weights").write_text("whole")

    def make(folder: Path) -> None:
        made.append(folder)
        save_folder(folder, write)

    def ask() -> None:
        both.wait()
        assert (made_once("model", make) / "weights").read_text() == "whole"

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert made == [cache / "model"]


def test_what_a_killed_process_left_is_removed_and_the_folder_made(cache: Path) -> None:
    for name in (".model.1234.partial", ".model.scratch.partial", ".model-2.1234.partial"):
        (cache / name).mkdir(parents=True)
        (cache / name / "half").write_text("x")
    made_once("model", lambda folder: folder.mkdir())
    assert {path.name for path in cache.iterdir()} == {"model", ".model-2.1234.partial"}


def test_what_was_needed_on_the_way_is_removed_when_it_fails(cache: Path) -> None:
    def make(folder: Path) -> None:
        with scratch_for(folder) as scratch:
            (scratch / "download").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        made_once("model", make)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_says_what_to_set(cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(OutputError, match=r"the cache .* cannot be used: .* Set XDG_CACHE_HOME"):
        made_once("model", lambda folder: folder.mkdir())

"""An input stands for files: which ones, and in which order."""

import os
from pathlib import Path

import pytest

from mars_ray.data.record_file import find_sources
from mars_ray.errors import DataError

FILES = (
    "b.jsonl",
    "a.parquet",
    "notes.txt",
    "_SUCCESS",
    ".part.jsonl",
    "deep/c.ndjson.zst",
    "deep/d.json.gz",
    "deep/_temporary/e.parquet",
    ".cache/f.jsonl",
    "other/a[1].jsonl",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def found(folder: Path, given: str) -> list[str]:
    return [str(path).removeprefix(f"{folder}/") for path in find_sources(f"{folder}/{given}")]


def test_a_file_is_itself_even_if_its_name_looks_like_a_pattern(folder: Path) -> None:
    assert found(folder, "b.jsonl") == ["b.jsonl"]
    assert found(folder, "other/a[1].jsonl") == ["other/a[1].jsonl"]


def test_a_folder_is_its_files_of_known_kinds_in_order_and_nothing_hidden(folder: Path) -> None:
    assert found(folder, "") == ["a.parquet", "b.jsonl", "deep/c.ndjson.zst", "deep/d.json.gz", "other/a[1].jsonl"]


def test_a_pattern_is_what_it_matches_folders_included(folder: Path) -> None:
    assert found(folder, "*.jsonl") == ["b.jsonl"]
    assert found(folder, "**/*.parquet") == ["a.parquet"]
    assert found(folder, "de*") == ["deep/c.ndjson.zst", "deep/d.json.gz"]
    assert found(folder, "**") == found(folder, "")


def test_what_is_hidden_is_taken_when_it_is_asked_for_by_name(folder: Path) -> None:
    assert found(folder, ".part.jsonl") == [".part.jsonl"]
    assert found(folder, "deep/_temp*/*") == ["deep/_temporary/e.parquet"]
    assert found(folder, ".cache") == [".cache/f.jsonl"]


def test_an_input_without_files_is_refused_with_what_was_given_and_what_is_known(folder: Path) -> None:
    (folder / "empty").mkdir()
    for given, reason in (
        ("none.jsonl", r"no file or folder .*none\.jsonl"),
        ("*.csv", r"no file matches it as a pattern.*\.jsonl\.zst"),
        ("notes.txt", r"notes\.txt holds no file whose name ends with \.parquet, \.jsonl"),
        ("empty", r"empty holds no file"),
    ):
        with pytest.raises(DataError, match=reason):
            find_sources(f"{folder}/{given}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_not_passed_over(folder: Path) -> None:
    (folder / "deep").chmod(0)
    with pytest.raises(DataError, match="deep cannot be read: Permission denied"):
        find_sources(str(folder))
    (folder / "deep").chmod(0o700)

"""An input stands for files: which ones, and in which order."""

import os
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.data.file_patterns import find_matches
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


def matched(folder: Path, name: str) -> list[str]:
    return [str(match.path).removeprefix(f"{folder}/") for match in find_matches(f"{folder}/{name}").files]


def test_a_file_is_itself_even_if_its_name_looks_like_a_pattern(folder: Path) -> None:
    assert matched(folder, "b.jsonl") == ["b.jsonl"]
    assert matched(folder, "other/a[1].jsonl") == ["other/a[1].jsonl"]


def test_a_folder_is_its_files_of_known_kinds_in_order_and_nothing_hidden(folder: Path) -> None:
    assert matched(folder, "") == ["a.parquet", "b.jsonl", "deep/c.ndjson.zst", "deep/d.json.gz", "other/a[1].jsonl"]


def test_a_pattern_is_what_it_matches_folders_included(folder: Path) -> None:
    assert matched(folder, "*.jsonl") == ["b.jsonl"]
    assert matched(folder, "**/*.parquet") == ["a.parquet"]
    assert matched(folder, "de*") == ["deep/c.ndjson.zst", "deep/d.json.gz"]
    assert matched(folder, "**") == matched(folder, "")


def test_what_is_hidden_is_taken_when_it_is_asked_for_by_name(folder: Path) -> None:
    assert matched(folder, ".part.jsonl") == [".part.jsonl"]
    assert matched(folder, "deep/_temp*/*") == ["deep/_temporary/e.parquet"]
    assert matched(folder, ".cache") == [".cache/f.jsonl"]


def test_an_input_without_files_is_refused_with_what_was_given_and_what_is_known(folder: Path) -> None:
    (folder / "empty").mkdir()
    for name, reason in (
        ("none.jsonl", r"no file or folder .*none\.jsonl"),
        ("*.csv", r"no file matches it as a pattern.*\.jsonl\.zst"),
        ("notes.txt", r"notes\.txt holds no file whose name ends with \.parquet, \.jsonl"),
        ("empty", r"empty holds no file"),
    ):
        with pytest.raises(DataError, match=reason):
            find_matches(f"{folder}/{name}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_not_passed_over(folder: Path) -> None:
    (folder / "deep").chmod(0)
    with pytest.raises(DataError, match="deep cannot be read: Permission denied"):
        find_matches(str(folder))
    (folder / "deep").chmod(0o700)


def test_a_loop_of_links_ends_and_is_named(folder: Path) -> None:
    (folder / "deep" / "up").symlink_to("..")
    (folder / "again").symlink_to(".")
    matches = find_matches(f"{folder}/**/*.jsonl")
    assert [match.path for match in matches.files] == [folder / "b.jsonl", folder / "other" / "a[1].jsonl"]
    assert matches.repeated_links == [folder / "again", folder / "deep" / "up"]


def test_a_link_to_another_folder_is_followed_in_a_pattern_and_named_in_a_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "z.jsonl").touch()
    (folder / "linked").symlink_to(elsewhere)
    assert "linked/z.jsonl" in matched(folder, "**/*.jsonl")
    assert matched(folder, "linked") == ["linked/z.jsonl"]
    assert "linked/z.jsonl" not in matched(folder, "")
    assert find_matches(str(folder)).ignored_links == [folder / "linked"]


def test_a_folder_is_named_by_its_path_without_a_link(folder: Path) -> None:
    (folder / "a-link").symlink_to("deep")
    assert matched(folder, "**/*.zst") == ["deep/c.ndjson.zst"]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("b.jsonl", "b.jsonl"),
        ("deep", "deep"),
        ("**/*.zst", ""),
        ("deep/*.zst", "deep"),
        ("*/c.ndjson.zst", "deep/c.ndjson.zst"),
        ("*/*.zst", ""),
    ],
)
def test_a_file_comes_with_the_lowest_path_that_is_named_without_a_wildcard(
    folder: Path, name: str, named: str
) -> None:
    assert find_matches(f"{folder}/{name}").files[0].named == folder / named


FILE_PATHS = st.tuples(
    st.lists(st.sampled_from(["a", "b", "_c", "d.jsonl"]), max_size=3), st.sampled_from(["a.jsonl", "b.jsonl"])
)
PARTS = st.sampled_from(["**", "*", "a", "b", "_*", "?", "[ab]*", "*.jsonl", "a.jsonl"])


@given(st.lists(FILE_PATHS, max_size=6), st.lists(PARTS, min_size=1, max_size=4))
def test_a_pattern_matches_what_glob_matches(paths: list[tuple[list[str], str]], parts: list[str]) -> None:
    with TemporaryDirectory() as temporary:
        root = Path(temporary)
        for folders, name in paths:
            root.joinpath(*folders).mkdir(parents=True, exist_ok=True)
            root.joinpath(*folders, name).touch()
        pattern = f"{root}/{'/'.join(parts)}"
        matches = map(Path, [pattern] if Path(pattern).exists() else glob(pattern, recursive=True))  # noqa: PTH207
        expected = {
            file
            for path in matches
            for file in [path, *path.rglob("*")]
            if file.is_file() and ("_*" in parts or "_c" not in file.parts)
        }
        try:
            files = {match.path for match in find_matches(pattern).files}
        except DataError:
            files = set()
        assert files == expected

"""The inputs of a job: each file once, whatever the paths say, and no output of a job."""

import json
import os
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from mars_ray.batch.output.folder import open_output
from mars_ray.batch.rows.row_tables import RowResult
from mars_ray.batch.run.input_files import JobInput, find_input
from mars_ray.errors import DataError
from mars_ray.storage.location import AnyPath, locate


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    return tmp_path if request.param == "disk" else locate(f"memory://{uuid4().hex}")


def write_rows(path: AnyPath) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"prompt": "x"}\n')


def answer_one_row(output: AnyPath) -> None:
    """Leave the output of a job that has answered one row, in JSONL."""
    with open_output(output, new=False) as opened:
        opened.begin("jsonl", {})
        opened.take([RowResult(key=b"a" * 16, records=('{"id": "a", "prompt": "x"}',))], 0.0)
        opened.flush()


def files_of(found: JobInput, root: AnyPath) -> list[str]:
    return [str(file.path).removeprefix(f"{root}/") for file in found.files]


@pytest.mark.parametrize("pattern", ["", "**", "*", "**/*.jsonl", "*/rows/../../*"])
def test_the_output_of_the_job_is_no_input(root: AnyPath, pattern: str) -> None:
    if ".." in pattern and not isinstance(root, Path):
        pytest.skip("stores have no parent folders in paths")
    write_rows(root / "a.jsonl")
    answer_one_row(root / "out")
    found = find_input([f"{root}/{pattern}".rstrip("/")], root / "out")
    assert files_of(found, root)[-1].endswith("a.jsonl")
    assert len(found.files) == 1
    assert [note.replace(f"{root}/", "") for note in found.notes if "output" in note] == [
        "left out 1 file below out: it is the output of this job"
    ]


def test_the_output_of_another_job_is_no_input_unless_its_rows_are_named(root: AnyPath) -> None:
    write_rows(root / "a.jsonl")
    answer_one_row(root / "out")
    found = find_input([f"{root}"], root / "next")
    assert files_of(found, root) == ["a.jsonl"]
    assert found.notes == (
        f"left out 1 file below {root}/out: it is the output of a job "
        f"(to answer its rows, give {root}/out/rows as an input)",
    )
    [shard] = (root / "out" / "rows").glob("part-00000*.jsonl")
    for name in ("out/rows", "out/rows/*.jsonl", "*/rows/*.jsonl", f"out/rows/{shard.name}"):
        assert files_of(find_input([f"{root}/{name}"], root / "next"), root) == [f"out/rows/{shard.name}"]
        with pytest.raises(
            DataError, match=r"rows.* holds nothing to answer: left out .*out: it is the output of this job"
        ):
            find_input([f"{root}/a.jsonl", f"{root}/{name}"], root / "out")


def test_a_pattern_that_reaches_the_own_output_too_is_read_without_it(root: AnyPath) -> None:
    answer_one_row(root / "other")
    answer_one_row(root / "out")
    found = find_input([f"{root}/*/rows"], root / "out")
    [shard] = (root / "other" / "rows").glob("part-*")
    assert files_of(found, root) == [f"other/rows/{shard.name}"]
    assert any("it is the output of this job" in note for note in found.notes)


def test_a_hard_link_to_an_own_answer_is_no_input(tmp_path: Path) -> None:
    answer_one_row(tmp_path / "out")
    (tmp_path / "copy.jsonl").hardlink_to(tmp_path / "out" / "rows" / "part-00000.jsonl")
    with pytest.raises(DataError, match="it is the output of this job"):
        find_input([f"{tmp_path}/copy.jsonl"], tmp_path / "out")


def test_answers_of_a_job_are_rows_without_its_threshold_and_with_ids_of_their_own(root: AnyPath) -> None:
    records = tuple(json.dumps({"id": "a", "sample": n, "prompt": "x", "threshold": 1.0}) for n in (0, 1))
    with open_output(root / "out", new=False) as output:
        output.begin("jsonl", {})
        output.take([RowResult(key=b"a" * 16, records=records)], 0.0)
        output.flush()
    [file] = find_input([f"{root}/out/rows"], root / "next").files
    rows = [json.loads(raw) for chunk in file.read(8) for raw in chunk]
    assert [row["id"] for row in rows] == ["a", "a#1"] and "threshold" not in rows[0]


def test_a_link_to_a_partition_gives_its_column(tmp_path: Path) -> None:
    write_rows(tmp_path / "lang=en" / "a.jsonl")
    (tmp_path / "english").symlink_to("lang=en")
    [file] = find_input([f"{tmp_path}/english"], tmp_path / "out").files
    assert file.partitions == {"lang": "en"}


def test_an_input_that_holds_only_outputs_is_refused_with_the_reason(root: AnyPath) -> None:
    for number in range(4):
        answer_one_row(root / f"out-{number}")
    with pytest.raises(DataError, match=r"out-0 holds nothing to answer: left out 1 file below .*the output of a job"):
        find_input([f"{root}/out-0"], root / "next")
    with pytest.raises(DataError, match=r"left out 4 files below .*out-2 and 1 more: they are outputs of jobs\."):
        find_input([f"{root}"], root / "next")


@pytest.mark.parametrize("kept", ["ledger", "log", "reports"])
def test_an_output_is_recognised_by_its_ledger_its_log_or_its_reports(root: AnyPath, kept: str) -> None:
    names = {
        "ledger": [".job/ledger.sqlite"],
        "log": [".job/log/0000000001.parquet"],
        "reports": ["report.json", "report.html"],
    }[kept]
    for name in ("a.jsonl", "out/rows/part-00000.jsonl", *(f"out/{name}" for name in names)):
        write_rows(root / name)
    assert files_of(find_input([f"{root}"], root / "next"), root) == ["a.jsonl"]


def test_links_to_an_output_are_no_input(tmp_path: Path) -> None:
    write_rows(tmp_path / "d" / "a.jsonl")
    answer_one_row(tmp_path / "out")
    (tmp_path / "d" / "answers").symlink_to("../out/rows")
    (tmp_path / "d" / "one.jsonl").symlink_to("../out/rows/part-00000.jsonl")
    (tmp_path / "same").symlink_to("out")
    for output in ("out", "same", "d/../out", "next"):
        found = find_input([f"{tmp_path}/d/**/*.jsonl"], tmp_path / output)
        assert files_of(found, tmp_path) == ["d/a.jsonl"]
    assert files_of(find_input([f"{tmp_path}/d/answers"], tmp_path / "next"), tmp_path / "d") == [
        "answers/part-00000.jsonl"
    ]
    for name in ("d/answers", "d/one.jsonl", "same/rows", "same"):
        with pytest.raises(DataError, match="the output of this job"):
            find_input([f"{tmp_path}/{name}"], tmp_path / "out")


def test_relative_paths_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "d" / "a.jsonl")
    answer_one_row(tmp_path / "d" / "out")
    monkeypatch.chdir(tmp_path / "d")
    for name, output in ((".", "out"), ("../d/", "./out/"), ("**", f"{tmp_path}/d/out"), ("*", "../d/out")):
        found = find_input([name], Path(output))
        assert [file.path for file in found.files] == [tmp_path / "d" / "a.jsonl"]
        assert found.notes == ("left out 1 file below out: it is the output of this job",)


def test_a_file_that_several_inputs_name_is_read_once(root: AnyPath) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(root / name)
    found = find_input([f"{root}/b.jsonl", f"{root}/*.jsonl", f"{root}"], root / "out")
    assert files_of(found, root) == ["b.jsonl", "a.jsonl"]
    assert found.notes == (f"found more than once and read once: {root}/a.jsonl, {root}/b.jsonl",)


def test_a_url_of_this_machine_is_the_path(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl")
    names = [f"{tmp_path}/a.jsonl", f"file://{tmp_path}/a.jsonl", f"local://{tmp_path}/a.jsonl"]
    assert files_of(find_input(names, tmp_path / "out"), tmp_path) == ["a.jsonl"]


def test_urls_of_one_object_are_one_file(bucket: UPath) -> None:
    write_rows(bucket / "d" / "a.jsonl")
    answer_one_row(bucket / "d" / "out")
    url = f"{bucket}d"
    names = [f"{url}/a.jsonl", url.replace("s3:", "s3a:"), f"{url}/", f"{url}/**/*.jsonl"]
    for output in (f"{url}/out", f"{url.replace('s3:', 's3a:')}/out/"):
        found = find_input(names, locate(output))
        assert files_of(found, bucket) == [f"{bucket}d/a.jsonl"]
        assert found.notes[0] == f"left out 1 file below {url}/out: it is the output of this job"


def test_the_path_of_a_file_is_one_without_links(tmp_path: Path) -> None:
    write_rows(tmp_path / "lang=en" / "part.jsonl")
    (tmp_path / "a.jsonl").symlink_to("lang=en/part.jsonl")
    [file] = find_input([f"{tmp_path}/a.jsonl", f"{tmp_path}/lang=en"], tmp_path / "out").files
    assert file.partitions == {"lang": "en"}


def test_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("none.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read: No such file"):
        find_input([f"{tmp_path}"], tmp_path / "out")


def test_a_column_that_rows_must_not_get_from_a_folder_is_left_out_with_the_reason(tmp_path: Path) -> None:
    write_rows(tmp_path / "lang=en" / "seed=3" / "a.jsonl")
    found = find_input([f"{tmp_path}"], tmp_path / "out")
    assert [file.partitions for file in found.files] == [{"lang": "en"}]
    reason = "these names are reserved for the options of a row"
    assert found.notes == (f"folders named seed=... add no column, because {reason}",)


def test_rows_of_openai_batch_files_get_no_column_from_a_folder(tmp_path: Path) -> None:
    write_rows(tmp_path / "lang=en" / "a.jsonl")
    found = find_input([f"{tmp_path}"], tmp_path / "out").without_partitions()
    assert [dict(file.partitions) for file in found.files] == [{}]
    reason = "rows of OpenAI batch files have no other columns"
    assert found.notes == (f"folders named lang=... add no column, because {reason}",)


FOLDERS = ["", "a", "a/b", "k=v", "k=v/b"]
NAMES = [f"{folder}/{name}".lstrip("/") for folder in FOLDERS for name in ("x.jsonl", "y.jsonl")]
LINKS = st.tuples(st.sampled_from(["file", "hard link", "link", "folder link"]), st.integers(0, 9), st.integers(0, 9))
INPUTS = ["", "**", "**/*.jsonl", "*", "*/*.jsonl", "a", "a/**", "k=*/**", "a/../a", "*/**/x.jsonl"]


@given(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
    st.lists(LINKS, max_size=6),
    st.lists(st.sampled_from(INPUTS), min_size=1, max_size=3),
)
def test_whatever_paths_lead_to_a_file_it_is_read_once(
    written: list[str], links: list[tuple[str, int, int]], patterns: list[str]
) -> None:
    with TemporaryDirectory() as temporary:
        root = Path(temporary)
        for folder in FOLDERS:
            (root / folder).mkdir(exist_ok=True)
        for name in written:
            (root / name).touch()
        for number, (kind, source, target) in enumerate(links):
            add_link(root, kind, FOLDERS[source % 5], f"{number}.jsonl", written[target % len(written)], target)
        inputs = [f"{root}/{pattern}" for pattern in ["**/*.jsonl", *patterns]]
        inputs = [name for name in inputs if has_files(name, root)]
        expected = {inode(path) for path in root.rglob("*") if path.is_file()}
        selections = [find_input(names, root / "out").files for names in permutations(inputs)]
        assert sorted(map(inode, (file.path for file in selections[0]))) == sorted(expected)
        for files in selections:
            assert {str(file) for file in files} == {str(file) for file in selections[0]}


def add_link(root: Path, kind: str, folder: str, name: str, target: str, number: int) -> None:
    match kind:
        case "hard link":
            os.link(root / target, root / folder / name)
        case "link":
            (root / folder / name).symlink_to(root / target)
        case "folder link":
            (root / folder / f"link-{name}").symlink_to(root / FOLDERS[number % 5])


def has_files(name: str, root: Path) -> bool:
    try:
        return bool(find_input([name], root / "out").files)
    except DataError:
        return False


def inode(path: AnyPath) -> tuple[int, int]:
    return path.stat().st_dev, path.stat().st_ino

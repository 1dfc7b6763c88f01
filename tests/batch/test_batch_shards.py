"""The output folder holds whole files only, whatever cuts the job short."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mars_ray.batch.job import GenerateJob
from mars_ray.batch.outcomes import OUTPUT_SCHEMA, Generated, Rejected, outcome_table, read_outcomes
from mars_ray.batch.shards import ShardWriter
from mars_ray.errors import InterruptedRunError, OutputError, RunError
from mars_ray.progress import ProgressLine

REJECTED = Rejected(id=None, reason="why", row="é{")


def answers(first: int, count: int) -> list[Generated]:
    return [
        Generated(id=str(number), prompt="p", text="t", tokens=4, forwards=2, finish_reason="length")
        for number in range(first, first + count)
    ]


def table(first: int, count: int) -> pa.Table:
    return read_outcomes(outcome_table(answers(first, count), 1.0)).generated


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ids_in(folder: Path) -> list[str]:
    return [each for path in sorted(folder.glob("*.parquet")) for each in pq.read_table(path)["id"].to_pylist()]


def job_progress() -> ProgressLine:
    return ProgressLine("generate", total=None)


def test_rows_are_cut_into_shards_of_a_fixed_size(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    writer = ShardWriter(folder, rows_per_shard=4)
    for first in range(0, 9, 3):
        writer.write(table(first, 3))
    assert names_in(folder) == ["part-00000.parquet", "part-00001.parquet"]
    writer.close({"rows": 9})
    assert names_in(folder) == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet", "report.json"]
    assert ids_in(folder) == [str(number) for number in range(9)]
    assert pq.read_schema(folder / "part-00002.parquet") == OUTPUT_SCHEMA
    assert json.loads((folder / "report.json").read_text()) == {"rows": 9}


def test_errors_are_one_json_object_a_line(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.reject([])
    assert names_in(tmp_path) == []
    writer.reject([REJECTED])
    writer.reject([REJECTED])
    lines = (tmp_path / "errors.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"id": None, "reason": "why", "row": "é{"}] * 2


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, message in (
        (tmp_path, "already in use"),
        (tmp_path / "file", "already in use"),
        (tmp_path / "file" / "below", "Cannot write"),
        (Path("/proc/nowhere"), "Cannot write"),
    ):
        with pytest.raises(OutputError, match=message):
            ShardWriter(folder)
    assert names_in(tmp_path) == ["file"]


def test_a_shard_that_cannot_be_finished_is_not_there(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, rows_per_shard=2)
    (tmp_path / "part-00000.parquet").mkdir()  # what the shard would replace cannot be replaced
    with pytest.raises(RunError, match="Cannot write"):
        writer.write(table(0, 2))
    (tmp_path / "part-00000.parquet").rmdir()
    writer.flush()
    assert ids_in(tmp_path) == ["0", "1"]


def test_taking_back_removes_only_what_was_made_and_is_empty(tmp_path: Path) -> None:
    ShardWriter(tmp_path / "a" / "b").discard()
    assert names_in(tmp_path) == []
    ShardWriter(tmp_path).discard()
    assert tmp_path.is_dir()
    used = ShardWriter(tmp_path / "c")
    used.reject([REJECTED])
    used.discard()
    assert names_in(tmp_path / "c") == ["errors.jsonl"]


def test_a_job_reports_what_it_did(tmp_path: Path) -> None:
    clock = iter(range(100))
    job = GenerateJob(tmp_path / "out", workers=2, clock=lambda: float(next(clock)))
    tables = [outcome_table([*answers(0, 2), REJECTED], 3.0), outcome_table(answers(2, 1), 1.0)]
    with job_progress() as progress:
        report = job.collect(tables, progress)
    assert (report.rows, report.errors, report.tokens, report.forwards) == (3, 1, 12, 6)
    assert report.decode_seconds == pytest.approx(2.0)
    assert report.tokens_per_s == pytest.approx(6.0)
    assert report.tokens_per_forward == 2.0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["tokens"] == 12
    assert ids_in(tmp_path / "out") == ["0", "1", "2"]


def test_a_job_of_bad_rows_only_is_done(tmp_path: Path) -> None:
    with job_progress() as progress:
        report = GenerateJob(tmp_path / "out", 1).collect([outcome_table([REJECTED], 0.1)], progress)
    assert (report.rows, report.errors, report.tokens_per_forward) == (0, 1, 0.0)
    assert names_in(tmp_path / "out") == ["errors.jsonl", "report.json"]


def test_interrupted_a_job_keeps_what_it_has_and_says_how_to_start_again(tmp_path: Path) -> None:
    def tables() -> Iterator[pa.Table]:
        yield outcome_table([*answers(0, 3), REJECTED], 1.0)
        raise KeyboardInterrupt

    with job_progress() as progress, pytest.raises(InterruptedRunError, match=r"after 4 rows.*empty this one"):
        GenerateJob(tmp_path / "out", 1).collect(tables(), progress)
    assert ids_in(tmp_path / "out") == ["0", "1", "2"]
    assert names_in(tmp_path / "out") == ["errors.jsonl", "part-00000.parquet"]

"""A job whose input grows: its shards stay one table, whenever the driver is killed."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from mars_ray.batch.output import folder as module
from mars_ray.batch.output.folder import FileFormat, OutputFolder, open_output
from mars_ray.batch.rows.columns import Survey, output_schema
from mars_ray.batch.rows.row_tables import RowResult
from mars_ray.errors import RunError
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_file, write_new_object

Input = list[dict[str, Any]]
NUMBERS: Input = [{"k": 1, "f": 1}, {"k": 2, "f": 2}]
MIXED: Input = [{"k": "x", "f": 0.5, "new": [1]}]
values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab")
    | st.lists(st.integers())
)
inputs = st.lists(st.dictionaries(st.sampled_from("abc"), values), min_size=1, max_size=6)


class Killed(BaseException):
    """The end of a process."""


def survey(rows: Input) -> Survey:
    survey = Survey()
    for row in rows:
        survey.add(json.dumps(row).encode())
    return survey


@contextmanager
def begun(output: AnyPath, rows: Input, format: FileFormat = "parquet") -> Iterator[OutputFolder]:
    with open_output(output, new=False) as opened:
        opened.begin(format, survey(rows).kinds)
        yield opened


def answer(output: OutputFolder, rows: Input) -> None:
    """Store results of all rows; those of earlier runs are repeated."""
    for number, row in enumerate(rows):
        record = json.dumps({"id": str(number), "text": "answer"} | row)
        output.take([RowResult(key=number.to_bytes(16, "big"), records=(record,), tokens=(1,), forwards=(1,))], 1.0)


def run(output: AnyPath, rows: Input, format: FileFormat = "parquet", *, writes: int = 1000) -> None:
    """Answer rows, unless the driver is killed before it has written more than `writes` files."""
    left = [writes]

    def write(path: AnyPath, content: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        write_file(path, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROWS_PER_SHARD", 2)
        patch.setattr(module, "write_file", write)
        try:
            with begun(output, rows, format) as opened:
                answer(opened, rows)
                opened.flush()
        except Killed:
            pass


def table_in(output: AnyPath) -> pa.Table:
    """Return the rows of an output in their order, after a check that all shards have one schema."""
    paths: list[AnyPath] = sorted(output.glob("rows/part-*"), key=str)
    shards = [pq.read_table(io.BytesIO(path.read_bytes())) for path in paths]
    assert all(shard.schema == shards[0].schema for shard in shards)
    return pa.concat_tables(shards).sort_by("id")


def rows_in(output: Path) -> Input:
    lines = [line for path in output.glob("rows/part-*") for line in path.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda record: record["id"])


@given(st.lists(inputs, min_size=1, max_size=3), st.lists(st.integers(0, 5), max_size=4))
def test_an_input_that_grows_gives_the_table_of_the_whole_input(parts: list[Input], deaths: list[int]) -> None:
    with TemporaryDirectory() as temporary:
        grown, whole = Path(temporary) / "grown", Path(temporary) / "whole"
        rows: Input = []
        for number, part in enumerate(parts):
            rows += part
            for writes in deaths[number::2]:
                run(grown, rows, writes=writes)
            run(grown, rows)
        run(whole, rows)
        assert table_in(grown).equals(table_in(whole))
        assert table_in(grown).schema.equals(output_schema(survey(rows).kinds))


def test_jsonl_shards_get_text_where_kinds_conflict(tmp_path: Path) -> None:
    run(tmp_path / "out", NUMBERS, "jsonl")
    run(tmp_path / "out", NUMBERS + MIXED, "jsonl", writes=0)
    run(tmp_path / "out", NUMBERS + MIXED, "jsonl")
    run(tmp_path / "whole", NUMBERS + MIXED, "jsonl")
    assert rows_in(tmp_path / "out") == rows_in(tmp_path / "whole")
    assert [(row["k"], row["f"]) for row in rows_in(tmp_path / "out")] == [("1", 1), ("2", 2), ("x", 0.5)]


def test_the_columns_of_input_that_was_removed_stay(tmp_path: Path) -> None:
    run(tmp_path / "out", [*NUMBERS, {"gone": True}])
    with begun(tmp_path / "out", MIXED):
        pass
    assert table_in(tmp_path / "out").select(["k", "gone", "new"]).to_pylist() == [
        {"k": "1", "gone": None, "new": None},
        {"k": "2", "gone": None, "new": None},
        {"k": None, "gone": True, "new": None},
    ]


def test_a_job_in_which_no_row_has_an_answer_has_a_table_without_rows(tmp_path: Path) -> None:
    with begun(tmp_path / "out", NUMBERS) as output:
        output.take([RowResult(key=bytes(16), error="{}", reason="bad")], 1.0)
        output.flush()
    empty = ds.dataset(tmp_path / "out" / "rows").to_table()
    assert (len(empty), empty.schema) == (0, output_schema(survey(NUMBERS).kinds))
    assert pq.read_metadata(tmp_path / "out" / "rows" / "part-00000.parquet").num_row_groups == 0
    run(tmp_path / "out", NUMBERS + MIXED)
    assert table_in(tmp_path / "out")["k"].to_pylist() == ["2", "x"]


def test_a_shard_that_a_user_has_removed_is_no_obstacle(tmp_path: Path) -> None:
    run(tmp_path / "out", NUMBERS)
    (tmp_path / "out" / "rows" / "part-00000.parquet").unlink()
    run(tmp_path / "out", NUMBERS + MIXED)
    assert table_in(tmp_path / "out")["k"].to_pylist() == ["x"]


def test_an_output_in_a_store_is_widened_too(bucket: UPath, tmp_path: Path) -> None:
    run(bucket / "out", NUMBERS)
    for writes in (0, 1, 1000):
        run(bucket / "out", NUMBERS + MIXED + NUMBERS, writes=writes)
    run(bucket / "out", NUMBERS + MIXED + NUMBERS)
    run(tmp_path / "whole", NUMBERS + MIXED + NUMBERS)
    assert table_in(bucket / "out").equals(table_in(tmp_path / "whole"))


@pytest.mark.usefixtures("impatient", "manual")
def test_a_replaced_driver_overwrites_no_widened_shard(bucket: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_late(path: AnyPath, content: bytes) -> bool:
        """Write a shard after another driver has taken the job and widened the shard."""
        monkeypatch.setattr(module, "write_new_object", write_new_object)
        run(bucket / "out", NUMBERS + MIXED)
        return write_new_object(path, content)

    with begun(bucket / "out", NUMBERS) as frozen:
        answer(frozen, NUMBERS)
        monkeypatch.setattr(module, "write_new_object", write_late)
        with pytest.raises(RunError, match="Another driver has taken over the job"):
            frozen.flush()
    assert table_in(bucket / "out")["k"].to_pylist() == ["1", "2", "x"]


@pytest.mark.usefixtures("impatient", "manual")
def test_the_same_command_mends_a_shard_that_a_replaced_driver_rewrote_late(
    bucket: UPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Input = [*NUMBERS, *MIXED, {"newer": True}]

    def write_late(path: AnyPath, content: list[bytes]) -> None:
        """Rewrite a shard after another driver has taken the job and widened the shard further."""
        monkeypatch.setattr(module, "write_file", write_file)
        run(bucket / "out", rows)
        write_file(path, content)

    run(bucket / "out", NUMBERS)
    monkeypatch.setattr(module, "write_file", write_late)
    with pytest.raises(RunError, match="Another driver has taken over the job"), begun(bucket / "out", NUMBERS + MIXED):
        pass
    run(bucket / "out", rows)
    run(tmp_path / "whole", rows)
    assert table_in(bucket / "out").equals(table_in(tmp_path / "whole"))


@pytest.mark.usefixtures("impatient", "manual")
def test_a_driver_that_rewrites_a_shard_after_its_job_was_put_aside_changes_none_of_the_new_one(
    bucket: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_late(path: AnyPath, content: list[bytes]) -> None:
        monkeypatch.setattr(module, "write_file", write_file)
        with open_output(bucket / "out", new=True) as new:
            new.begin("parquet", survey(MIXED).kinds)
            answer(new, MIXED)
            new.flush()
        write_file(path, content)

    run(bucket / "out", NUMBERS)
    monkeypatch.setattr(module, "write_file", write_late)
    with pytest.raises(RunError, match="Another driver has taken over the job"), begun(bucket / "out", NUMBERS + MIXED):
        pass
    assert table_in(bucket / "out")["k"].to_pylist() == ["x"]

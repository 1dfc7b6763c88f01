"""Rows and results travel in tables, and so does the reason why there can be none."""

import gzip
from contextlib import closing
from pathlib import Path

import pytest

from mars_ray.batch.output.ledger import Ledger
from mars_ray.batch.rows.columns import Survey
from mars_ray.batch.rows.row_tables import RowResult, failure_in, failure_table, from_row_table, from_table, to_table
from mars_ray.batch.run.row_store import RowStore
from mars_ray.data.input_file import InputFile
from mars_ray.errors import DataError

RESULTS = [
    RowResult(key=b"a", records=('{"id": "a"}',), tokens=(3,), forwards=(2,), threshold=0.9, worker="one", age_s=1.5),
    RowResult(key=b"b", error='{"id": "b"}', reason="bad", worker="one"),
]


def test_results_come_out_of_a_table_as_they_went_in() -> None:
    assert from_table(to_table(RESULTS)) == RESULTS
    assert from_table(to_table([])) == []


def test_a_failure_is_told_from_results() -> None:
    assert failure_in(failure_table("no engine starts")) == "no engine starts"
    assert failure_in(to_table(RESULTS)) is None
    assert failure_in(to_table([])) is None


def stored(folder: Path, *raws: bytes, limit: int | None = None, done: int = 0) -> tuple[Survey, list[str]]:
    """Fill a store with rows, of which the ledger lists the first ones as done."""
    folder.mkdir()
    file = folder / "rows.jsonl"
    file.write_bytes(b"\n".join(raws))
    with closing(Ledger(folder / "ledger.sqlite", of=folder, durable=True)) as ledger, RowStore(ledger.path) as store:
        store.fill([InputFile(file)], id_column="id", limit=None)
        row_ids = [row_id for table in store.tables() for row_id in from_row_table(table)[0]]
        with ledger.transaction():
            ledger.add([RowResult(key=row_id.key) for row_id in row_ids[:done]])
        survey = store.fill([InputFile(file)], id_column="id", limit=limit)
        return survey, [row_id.id for table in store.tables() for row_id in from_row_table(table)[0]]


ROWS = [b'{"id": "a"}', b'{"id": "b", "n": 1}', b"{oops", b'{"id": "c", "n": 2}']


@pytest.mark.parametrize(
    ("limit", "done", "left"), [(None, 0, [0, 1, 2, 3]), (None, 1, [1, 2, 3]), (2, 1, [1]), (None, 4, [])]
)
def test_the_store_has_the_rows_without_an_answer_and_the_survey_counts_all(
    tmp_path: Path, limit: int | None, done: int, left: list[int]
) -> None:
    _, ids = stored(tmp_path / "all", *ROWS)
    survey, ids_left = stored(tmp_path / "rest", *ROWS, limit=limit, done=done)
    assert ids_left == [ids[number] for number in left]
    assert survey.rows == (limit or len(ROWS))
    assert survey.kinds == {"id": ["text"], "n": ["int"]}


def test_an_input_that_cannot_be_read_to_its_end_is_refused_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "b"}\n' * 1000)[:-20])
    with closing(Ledger(tmp_path / "ledger.sqlite", of=tmp_path, durable=True)) as ledger:
        with pytest.raises(DataError, match=r"rows.jsonl.gz cannot be read"), RowStore(ledger.path) as store:
            store.fill([InputFile(path)], id_column="id", limit=None)
        assert not store.path.exists()

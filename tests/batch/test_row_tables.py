"""Results travel in tables, and so does the reason why there can be none."""

import gzip
from pathlib import Path

from mars_ray.batch.output.ledger import Ledger
from mars_ray.batch.ray.source import InputRows
from mars_ray.batch.rows.row_tables import RowResult, failure_in, failure_table, from_table, to_table
from mars_ray.data.input_file import InputFile

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


def test_an_input_that_cannot_be_read_to_its_end_ends_with_the_reason(tmp_path: Path) -> None:
    path, ledger = tmp_path / "rows.jsonl.gz", tmp_path / "ledger.sqlite"
    Ledger(ledger, of=ledger.parent, durable=True).close()
    path.write_bytes(gzip.compress(b'{"id": "b"}\n' * 1000)[:-20])
    *_, last = InputRows(files=(InputFile(path),), ledger=ledger, id_column="id").tables()
    assert "rows.jsonl.gz cannot be read" in str(failure_in(last))

"""The rows of somebody's own pipeline: what is asked travels in a column beside theirs, and answers become columns.

Requests travel as JSON text: as columns of Arrow, what some rows ask and others do not would be of one type for all.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from mars_ray.batch.rows.columns import OURS
from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.batch.rows.row_ids import ID_DIGITS, RowId
from mars_ray.batch.rows.row_result import RowResult
from mars_ray.batch.rows.row_table import to_row_table
from mars_ray.errors import ConfigError, RequestError

REQUEST = "__mars_ray_request"
"""The column that holds requests on their way to a stage."""
ASKED = ("messages", "prompt", "sampling", "threshold", "mode")
"""What a request may hold."""
ANSWERED = {
    name: OURS[name]
    for name in (
        *("sample", "text", "finish_reason", "tokens", "forwards", "tokens_per_forward", "threshold", "logprobs"),
    )
} | {"error": pa.string()}
"""The columns that a stage adds; each takes the place of one of the same name."""

Preprocess = Callable[[dict[str, Any]], dict[str, Any]]


def with_requests(table: pa.Table, preprocess: Preprocess | None) -> pa.Table:
    """Return the rows with what `preprocess` asks for each; without it, what their own columns ask.

    Raises `ConfigError` when it asks for what nobody knows.
    """
    requests = [_request(row, preprocess) for row in table.to_pylist()]
    return _replaced(table, REQUEST, pa.array(requests, pa.binary()))


def rows_to_answer(table: pa.Table) -> pa.Table:
    """Return the requests as rows that a decoder takes. Equal requests have one id, from which seeds are made."""
    raws = table[REQUEST].to_pylist()
    row_ids = [
        RowId(key=number.to_bytes(8, "big"), id=hashlib.sha256(raw).hexdigest()[:ID_DIGITS], repeated=False)
        for number, raw in enumerate(raws)
    ]
    return to_row_table(row_ids, raws)


def with_answers(table: pa.Table, results: Sequence[RowResult], *, raise_errors: bool) -> pa.Table:
    """Return the rows with the columns of `ANSWERED`; a row with n answers is there n times.

    `results` are in the order of the rows. Raises `RequestError` for the first row with an error if `raise_errors`.
    """
    if raise_errors:
        for result in results:
            if result.error is not None:
                raise RequestError(f"a row has no answer: {result.reason}")
    records = [_records(each) for each in results]
    answers = pa.Table.from_pylist(list(chain.from_iterable(records)), schema=pa.schema(ANSWERED))
    if any(len(each) > 1 for each in records):
        table = table.take([number for number, each in enumerate(records) for _ in each])
    for name in answers.column_names:
        table = _replaced(table, name, answers[name])
    return table.drop_columns(REQUEST)


def _request(row: dict[str, Any], preprocess: Preprocess | None) -> bytes:
    asked = {name: row[name] for name in ASKED if row.get(name) is not None} if preprocess is None else preprocess(row)
    if unknown := sorted(set(asked) - set(ASKED)):
        raise ConfigError(f"preprocess gives {unknown[0]!r}; a request is made of {', '.join(ASKED)}.")
    return json.dumps(asked, ensure_ascii=False, default=_plain).encode(errors="surrogatepass")


def _plain(value: Any) -> Any:
    """Return numbers and arrays of numpy as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ConfigError(f"a request holds {type(value).__name__} {str(value)[:60]!r}; it must be JSON.")


def _records(result: RowResult) -> list[JsonRecord]:
    if result.error is not None:
        return [{"error": result.reason}]
    return [json.loads(record) for record in result.records]


def _replaced(table: pa.Table, name: str, column: Any) -> pa.Table:
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)

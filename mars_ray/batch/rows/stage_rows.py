"""Add requests and answers as columns to the rows of a user's pipeline.

A request is stored as JSON text in one column, because rows have different options but an Arrow column has one type.

A struct column has the fields of all its rows. A null field of a struct is therefore left out of a request, as if the
row did not have it. `preprocess` still sees the null fields.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from mars_ray.batch.rows.columns import ANSWER_COLUMNS
from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.batch.rows.row_ids import ID_DIGITS, RowId
from mars_ray.batch.rows.row_tables import RowResult, as_json, to_row_table
from mars_ray.data.arrow_json import json_values, text_of_bytes
from mars_ray.errors import ConfigError, RequestError
from mars_ray.openai_api.chat_prompts import TOOL_FIELDS

REQUEST = "__mars_ray_request"
"""Name of the column that holds the request of each row."""
REQUEST_FIELDS = ("messages", "prompt", "sampling", "threshold", "mode", *TOOL_FIELDS)
STAGE_COLUMNS = {
    name: ANSWER_COLUMNS[name]
    for name in (
        *("sample", "text", "finish_reason", "tokens", "forwards", "tokens_per_forward", "threshold"),
        *("reasoning_content", "tool_calls", "logprobs", "prompt_logprobs"),
    )
} | {"error": pa.string()}
"""Columns that a stage adds to its rows. Existing columns with these names are replaced."""

Preprocess = Callable[[dict[str, Any]], dict[str, Any]]


def with_requests(table: pa.Table, preprocess: Preprocess | None) -> pa.Table:
    """Return the rows with a column of requests.

    `preprocess` turns a row into its request. Without `preprocess`, the request consists of the row's own columns.
    Raises `ConfigError` for an unknown field of a request.
    """
    names = [name for name in table.column_names if preprocess is not None or name in REQUEST_FIELDS]
    columns = [_python_values(table[name]) for name in names]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [{}] * len(table)
    requests = [_request(row, preprocess) for row in rows]
    return _replaced(table, REQUEST, pa.array(requests, pa.binary()))


def rows_to_answer(table: pa.Table) -> pa.Table:
    """Return the requests as rows for a decoder. Equal requests get the same id and therefore the same seed."""
    raws = table[REQUEST].to_pylist()
    row_ids = [
        RowId(key=number.to_bytes(8, "big"), id=hashlib.sha256(raw).hexdigest()[:ID_DIGITS])
        for number, raw in enumerate(raws)
    ]
    return to_row_table(row_ids, raws)


def with_answers(table: pa.Table, results: Sequence[RowResult], *, raise_errors: bool) -> pa.Table:
    """Return the rows with `STAGE_COLUMNS` added. A row with n answers appears n times.

    `results` must be in the order of the rows. With `raise_errors`, raises `RequestError` for the first error.
    """
    if raise_errors:
        for result in results:
            if result.error is not None:
                raise RequestError(f"a row has no answer: {result.reason}")
    records = [_records(result) for result in results]
    answer_table = pa.Table.from_pylist(list(chain.from_iterable(records)), schema=pa.schema(STAGE_COLUMNS))
    if any(len(answers) > 1 for answers in records):
        table = table.take([number for number, answers in enumerate(records) for _ in answers])
    for name in answer_table.column_names:
        table = _replaced(table, name, answer_table[name])
    return table.drop_columns(REQUEST)


def _request(row: dict[str, Any], preprocess: Preprocess | None) -> bytes:
    if preprocess is None:
        request = {name: row[name] for name in REQUEST_FIELDS if row.get(name) is not None}
    else:
        request = preprocess(row)
    if unknown := sorted(set(request) - set(REQUEST_FIELDS)):
        raise ConfigError(
            f"preprocess returned the unknown field {unknown[0]!r}; a request may have {', '.join(REQUEST_FIELDS)}."
        )
    return as_json(_without_nulls(request), default=_plain).encode()


class _Struct(dict[str, Any]):
    """A value of a struct column."""


def _python_values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column, with structs as `_Struct`. Values that Python cannot represent become JSON values,
    because the column may be one that no request uses."""
    try:
        values = column.to_pylist()
    except Exception:  # Arrow raises errors of many kinds here
        return list(chain.from_iterable(map(json_values, column.chunks)))
    return [_marked(value, column.type) for value in values] if pa.types.is_nested(column.type) else values


def _marked(value: Any, type: pa.DataType) -> Any:
    """Return a value of a column in which every struct is a `_Struct`."""
    if value is None or not pa.types.is_nested(type):
        return value
    if pa.types.is_struct(type):
        return _Struct({name: _marked(value[name], type.field(name).type) for name in value})
    if pa.types.is_map(type):
        return [(key, _marked(item, type.item_type)) for key, item in value]
    return [_marked(item, type.value_type) for item in value]


def _without_nulls(value: Any) -> Any:
    """Return a request without the null fields of structs."""
    match value:
        case _Struct():
            return {name: _without_nulls(item) for name, item in value.items() if item is not None}
        case dict():
            return {name: _without_nulls(item) for name, item in value.items()}
        case list() | tuple():
            return [_without_nulls(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    """Return a numpy number or array as a Python value, and bytes as text that a reader refuses if it is not UTF-8."""
    if isinstance(value, bytes):
        return text_of_bytes(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ConfigError(f"a request has the {type(value).__name__} {str(value)[:60]!r}, which is not a JSON value.")


def _records(result: RowResult) -> list[JsonRecord]:
    if result.error is not None:
        return [{"error": result.reason}]
    return [json.loads(record) for record in result.records]


def _replaced(table: pa.Table, name: str, column: Any) -> pa.Table:
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)

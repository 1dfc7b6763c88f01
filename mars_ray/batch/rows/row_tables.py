"""Tables of rows and tables of results, which the processes of a job exchange.

A failure table, made by `failure_table`, ends the job and gives the reason. Processes pass errors on in tables, because
Ray passes on only the text of an exception.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, get_type_hints

import pyarrow as pa

from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.batch.rows.row_ids import RowId
from mars_ray.traces.engine_call import EndedSequence

FAILURE = "failure"
"""Name of the column that holds the reason in a failure table. In all other tables, the column is null."""
ROW_SCHEMA = pa.schema(
    [("key", pa.binary()), ("id", pa.string()), ("is_own", pa.bool_()), ("repeated", pa.bool_()), ("raw", pa.binary())]
)
ARROW_TYPES: dict[Any, pa.DataType] = {int: pa.int64(), float: pa.float64()}
"""Arrow types of the numbers in `EndedSequence`; its other fields are text."""
SEQUENCE = pa.struct(
    [(name, ARROW_TYPES.get(type, pa.string())) for name, type in get_type_hints(EndedSequence).items()]
)
RESULT_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("records", pa.list_(pa.string())),
        ("error", pa.string()),
        ("reason", pa.string()),
        ("tokens", pa.list_(pa.int64())),
        ("forwards", pa.list_(pa.int64())),
        ("cut", pa.int64()),
        ("threshold", pa.float64()),
        ("worker", pa.string()),
        ("age_s", pa.float64()),
        ("sequences", pa.list_(SEQUENCE)),
        (FAILURE, pa.string()),
    ]
)


class RowResult(NamedTuple):
    """Result of one row: its answers, or its error."""

    key: bytes
    """Key of the row, unique within the input."""
    records: tuple[str, ...] = ()
    """Output records as JSON: one for each sequence, or one for all sequences together."""
    error: str | None = None
    """The row's record in the errors file, as JSON; None if there is no error."""
    reason: str = ""
    """Message of the error; empty if there is no error."""
    tokens: tuple[int, ...] = ()
    """Number of tokens generated for each sequence."""
    forwards: tuple[int, ...] = ()
    """Number of forwards that generated tokens for each sequence."""
    cut: int = 0
    """Number of sequences that ended at the length limit."""
    threshold: float | None = None
    """Lowest threshold in force during decoding; None if nothing was generated."""
    worker: str = ""
    """Name of the worker that produced the result."""
    age_s: float = 0.0
    """Seconds from the time when the worker became ready to this result."""
    sequences: tuple[EndedSequence, ...] = ()
    """Times of each sequence, for traces."""


def as_json(record: JsonRecord, default: Callable[[Any], Any] | None = None) -> str:
    """Return a record as one line of JSON. Unpaired surrogates are escaped, so that the line is valid UTF-8.

    `default` converts values of other types, as in `json.dumps`.
    """
    text = json.dumps(record, ensure_ascii=False, default=default)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(record, default=default)
    return text


def to_row_table(row_ids: Sequence[RowId], raws: Sequence[bytes]) -> pa.Table:
    """Return a table of rows and their ids."""
    columns = {name: [getattr(row_id, name) for row_id in row_ids] for name in ROW_SCHEMA.names if name != "raw"}
    return pa.table(columns | {"raw": list(raws)}, schema=ROW_SCHEMA)


def from_row_table(table: pa.Table) -> tuple[list[RowId], list[bytes]]:
    """Return the ids and the rows of a table; the inverse of `to_row_table`."""
    rows = table.to_pylist()
    raws = [row.pop("raw") for row in rows]
    return [RowId(**row) for row in rows], raws


def to_table(results: Sequence[RowResult]) -> pa.Table:
    """Return a table of results."""
    rows = [(*result[:-1], [asdict(sequence) for sequence in result.sequences]) for result in results]
    columns = list(zip(*rows, strict=True)) or [()] * len(RowResult._fields)
    return pa.table([*map(list, columns), [None] * len(results)], schema=RESULT_SCHEMA)


def from_table(table: pa.Table) -> list[RowResult]:
    """Return the results in a table; the inverse of `to_table`."""
    columns = {name: table[name].to_pylist() for name in RowResult._fields}
    for name in ("records", "tokens", "forwards"):
        columns[name] = list(map(tuple, columns[name]))
    columns["sequences"] = [tuple(EndedSequence(**fields) for fields in row) for row in columns["sequences"]]
    return list(map(RowResult._make, zip(*columns.values(), strict=True)))


def failure_table(reason: str) -> pa.Table:
    """Return a table that reports a failure from which a worker cannot recover."""
    return pa.Table.from_pylist([{FAILURE: reason}], schema=RESULT_SCHEMA)


def failure_in(table: pa.Table) -> str | None:
    """Return the reason if the table is a failure table, otherwise None."""
    return next(filter(None, table[FAILURE].to_pylist()), None)

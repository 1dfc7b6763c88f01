"""Columns of the output, which come from the answers and from the input.

All rows of the input are surveyed before any work starts, so that all shards have the same schema. A column whose
values are all of one kind keeps its type. Any other column, such as a column of lists, becomes JSON text.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.data.records import parse_object
from mars_ray.errors import BadRecordError, DataError

Kind = Literal["bool", "int", "long", "float", "text", "json"]
"""Kinds of column values. `long` is an integer that float64 cannot represent exactly."""
TYPES: dict[Kind, pa.DataType] = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "long": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
    "json": pa.string(),
}
LOGPROBS = pa.list_(
    pa.struct([("token", pa.int64()), ("logprob", pa.float64()), ("top", pa.list_(pa.list_(pa.float64())))])
)
ANSWER_COLUMNS: dict[str, pa.DataType] = {
    "id": pa.string(),
    "sample": pa.int64(),
    "prompt": pa.string(),
    "text": pa.string(),
    "tokens": pa.int64(),
    "forwards": pa.int64(),
    "tokens_per_forward": pa.float64(),
    "threshold": pa.float64(),
    "finish_reason": pa.string(),
    "reasoning_content": pa.string(),
    "tool_calls": pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())])),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "token_ids": pa.list_(pa.int64()),
    "accepted": pa.list_(pa.int64()),
}
COLUMNS_MAX = 1000
"""Maximum number of input columns, because each column costs memory in every row of the output."""

INT64 = range(-(2**63), 2**63)
FLOAT64 = range(-(2**53), 2**53 + 1)
"""Integers that float64 represents exactly."""


@dataclass(slots=True)
class Survey:
    """Number of rows in the input, and the kind of each column."""

    rows: int = 0
    kinds: dict[str, Kind | None] = field(default_factory=dict)
    """Kind of each column; None for a column without values."""

    def add(self, raws: Iterable[bytes]) -> None:
        """Count rows and note the kinds of their columns. Invalid rows are only counted.

        Raises `DataError` for too many columns.
        """
        for raw in raws:
            self.rows += 1
            try:
                fields = parse_object(raw)
            except (BadRecordError, RecursionError):
                continue
            for name, value in fields.items():
                self.kinds[name] = _common_kind(self.kinds.get(name), _kind(value))
            if len(self.kinds) > COLUMNS_MAX:
                raise DataError(
                    f"the first {self.rows} rows have more than {COLUMNS_MAX} different columns, and the output would "
                    "have all of them. Put values whose names differ from row to row into one object column."
                )


def table_of(texts: Sequence[str], kinds: dict[str, Kind | None]) -> pa.Table:
    """Return a table of `PlainFormat` records given as JSON. `kinds` has the kind of each input column."""
    input_kinds = {kept_name(name): kind or "json" for name, kind in kinds.items() if name != "id"}
    schema = pa.schema([*ANSWER_COLUMNS.items(), *((name, TYPES[kind]) for name, kind in input_kinds.items())])
    records: list[JsonRecord] = json.loads(f"[{','.join(texts)}]")  # faster than one call per record
    for name in [name for name, kind in input_kinds.items() if kind == "json"]:
        for record in records:
            if record.get(name) is not None:
                record[name] = json.dumps(record[name], ensure_ascii=False)
    return pa.Table.from_pylist(records, schema=schema)


def kept_name(column: str) -> str:
    """Return the output name of an input column, with the prefix `input_` if an answer column has the same name."""
    return f"input_{column}" if column in ANSWER_COLUMNS else column


def _kind(value: Any) -> Kind | None:
    match value:
        case None:
            return None
        case bool():
            return "bool"
        case int():
            return "int" if value in FLOAT64 else "long" if value in INT64 else "json"
        case float():
            return "float"
        case str():
            return "text"
        case _:
            return "json"


def _common_kind(first: Kind | None, second: Kind | None) -> Kind | None:
    if first is None or second is None or first == second:
        return first or second
    if {first, second} == {"int", "long"}:
        return "long"
    return "float" if {first, second} == {"int", "float"} else "json"

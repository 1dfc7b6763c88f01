"""The columns of the output: ours, and those the input has.

All rows of the input are looked at before any work, so that all shards have one schema. A column whose values are of
one kind keeps it; anything else, such as lists, becomes JSON text.
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
"""Kinds of values; `long` is an integer that no float64 may hold."""
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
OURS: dict[str, pa.DataType] = {
    "id": pa.string(),
    "sample": pa.int64(),
    "prompt": pa.string(),
    "text": pa.string(),
    "tokens": pa.int64(),
    "forwards": pa.int64(),
    "tokens_per_forward": pa.float64(),
    "threshold": pa.float64(),
    "finish_reason": pa.string(),
    "logprobs": LOGPROBS,
    "token_ids": pa.list_(pa.int64()),
    "accepted": pa.list_(pa.int64()),
}
COLUMNS_MAX = 1000
"""Different columns that the rows of an input may have together: each costs memory in every row of the output."""

INT64 = range(-(2**63), 2**63)
FLOAT64 = range(-(2**53), 2**53 + 1)
"""Integers that a float64 holds exactly."""


@dataclass(slots=True)
class Survey:
    """What the input holds: how many rows, and the kinds of their columns."""

    rows: int = 0
    kinds: dict[str, Kind | None] = field(default_factory=dict)
    """The kind of each column; None where no value was seen."""

    def look(self, raws: Iterable[bytes]) -> None:
        """Take more rows into account. What is no JSON object is a row too. Raises `DataError` for too many columns."""
        for raw in raws:
            self.rows += 1
            try:
                fields = parse_object(raw)
            except (BadRecordError, RecursionError):
                continue
            for name, value in fields.items():
                self.kinds[name] = _both(self.kinds.get(name), _kind(value))
            if len(self.kinds) > COLUMNS_MAX:
                raise DataError(
                    f"the first {self.rows} rows have more than {COLUMNS_MAX} different columns, and each becomes "
                    "one of the output. Put values whose names differ from row to row into one object column."
                )


def table_of(texts: Sequence[str], kinds: dict[str, Kind | None]) -> pa.Table:
    """Return records (JSON, of `PlainFormat`) as a table; `kinds` are those of the input's columns."""
    theirs = {name: kind or "json" for name, kind in kinds.items()}
    columns = [name if name not in OURS else f"input_{name}" for name in theirs if name != "id"]
    kind_of = {name: theirs[name.removeprefix("input_") if name not in theirs else name] for name in columns}
    schema = pa.schema([*OURS.items(), *((name, TYPES[kind]) for name, kind in kind_of.items())])
    records: list[JsonRecord] = json.loads(f"[{','.join(texts)}]")  # one call takes less time than one for each
    for name in [name for name, kind in kind_of.items() if kind == "json"]:
        for record in records:
            if record.get(name) is not None:
                record[name] = json.dumps(record[name], ensure_ascii=False)
    return pa.Table.from_pylist(records, schema=schema)


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


def _both(one: Kind | None, other: Kind | None) -> Kind | None:
    if one is None or other is None or one == other:
        return one or other
    if {one, other} == {"int", "long"}:
        return "long"
    return "float" if {one, other} == {"int", "float"} else "json"

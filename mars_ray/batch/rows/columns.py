"""Columns of the output, which come from the answers and from the input.

In:    the kinds of the values of each input column, from a survey of all rows, and the records of answered rows.
Out:   records that form one table: each column has one type, which depends only on the kinds of its values.
Never: fails because of a value in the input.

A column whose values are all of one kind keeps its type, and a column of lists or objects becomes JSON text. Numbers,
booleans, lists and objects in a column with values of other kinds become text: `1`, `1.5`, `true`, `[1]`. The text of a
number depends only on its value, not on its type, so values that were already written convert to the same text as the
values of the input: the output of a job whose input grew equals the output of a job that had the whole input at once.
"""

import json
import math
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from mars_ray.batch.rows.row_format import FLOAT64, JsonRecord, without_fraction
from mars_ray.chat.unicode_text import BLOB, BYTES, text_fault
from mars_ray.data.arrow_json import BYTES_MAX
from mars_ray.data.records import parse_object
from mars_ray.errors import BadRecordError, DataError

Kind = Literal["bool", "int", "long", "huge", "float", "text", "half", "json", "bytes", "nested_bytes", "blob"]
"""Kinds of values. `long` is an integer that float64 cannot represent exactly, and `huge` one beyond 64 bits. `half`
marks text with half of a surrogate pair, also inside lists and objects. `json` is a list or an object. `bytes` are
bytes that are not UTF-8, and `nested_bytes` marks such bytes inside lists and objects. `blob` is a value of more than
`BYTES_MAX` such bytes, of which only the digest is kept."""
MARKS: frozenset[Kind] = frozenset(("half", "nested_bytes"))
"""Kinds that say what is inside a value of another kind."""
ColumnKinds = dict[str, list[Kind]]
"""Kinds of the values of each input column, sorted; empty for a column without values."""
Written = Literal["bool", "int", "float", "text", "json", "bytes", "left out"]
"""Types of columns in the output. `json` is JSON text in parquet, and a list or an object in JSONL."""
TYPES: dict[Written, pa.DataType] = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
    "json": pa.string(),
    "bytes": pa.binary(),
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
HALVES = re.compile("[\ud800-\udfff]")
WORDS: dict[Kind, str] = {
    "bool": "booleans",
    "int": "numbers",
    "long": "numbers",
    "float": "numbers",
    "huge": "integers beyond 64 bits",
    "text": "text",
    "json": "lists or objects",
    "bytes": "bytes",
}


@dataclass(slots=True)
class Survey:
    """Number of rows in the input, and the kinds of the values of each column."""

    rows: int = 0
    kinds: ColumnKinds = field(default_factory=dict)

    def add(self, raw: bytes) -> JsonRecord | None:
        """Count a row, note the kinds of its values, and return its columns. An invalid row is only counted.

        Raises `DataError` for too many columns.
        """
        self.rows += 1
        try:
            fields = parse_object(raw)
        except BadRecordError:
            return None
        escapes = b"\\ud" in raw or b"\\uD" in raw
        for name, value in fields.items():
            known = self.kinds.setdefault(name, [])
            for kind in _kinds(value, escapes=escapes):
                if kind not in known:
                    known.append(kind)
                    known.sort()
        if len(self.kinds) > COLUMNS_MAX:
            raise DataError(
                f"the first {self.rows} rows have more than {COLUMNS_MAX} different columns, and the output would "
                "have all of them. Put values whose names differ from row to row into one object column."
            )
        return fields


def united(first: ColumnKinds, second: ColumnKinds) -> ColumnKinds:
    """Return the kinds of the values of two inputs together."""
    return {name: sorted({*first.get(name, ()), *second.get(name, ())}) for name in first | second}


def notes_on(kinds: ColumnKinds, *, jsonl: bool) -> Iterator[str]:
    """Yield a sentence for each column whose values are not written as they are."""
    for name, values in kinds.items():
        if name == "id":
            continue
        if fault := text_fault(name):
            yield f"column {name!a} is left out of the output, because its name has {fault}"
        elif "blob" in values:
            yield f"column {name!r} is left out of the output, because it has binary values of over {BYTES_MAX} bytes"
        elif note := _note(values, jsonl=jsonl):
            yield f"column {name!r} has {note}"


def output_schema(kinds: ColumnKinds) -> pa.Schema:
    """Return the schema of all shards."""
    return pa.schema([*ANSWER_COLUMNS.items(), *((name, TYPES[type]) for name, type in _written(kinds).items())])


def table_of(texts: Sequence[str], kinds: ColumnKinds) -> pa.Table:
    """Return a table of `PlainFormat` records given as JSON."""
    records: list[JsonRecord] = json.loads(f"[{','.join(texts)}]")  # faster than one call per record
    for name, type in _written(kinds).items():
        convert = CONVERSIONS.get(type)
        if convert is not None:
            for record in records:
                if record.get(name) is not None:
                    record[name] = convert(record[name])
    return pa.Table.from_pylist(records, schema=output_schema(kinds))


def widened(table: pa.Table, kinds: ColumnKinds) -> pa.Table:
    """Convert a table that `table_of` made for fewer kinds to the schema of `kinds`."""
    written = _written(kinds)

    def column(field: pa.Field) -> pa.ChunkedArray | pa.Array:
        if field.name not in table.column_names:
            return pa.nulls(len(table), field.type)
        column = table[field.name]
        if column.type == field.type:
            return column
        convert = CONVERSIONS.get(written[field.name], lambda value: value)
        return pa.array([None if value is None else convert(value) for value in column.to_pylist()], field.type)

    schema = output_schema(kinds)
    return pa.table([column(field) for field in schema], schema=schema)


def lines_of(texts: Iterable[str], kinds: ColumnKinds) -> Iterator[str]:
    """Yield `PlainFormat` records given as JSON with the values to write, as JSON.

    Values are converted only where `table_of` makes text of them, because JSON needs no other conversion. Bytes become
    base64 text. Lines that were already converted for some of the kinds may be converted again.
    """
    written = _written(kinds)
    odd = {kept_name(name) for name, values in kinds.items() if name != "id" and _is_odd(name, values)}
    for text in texts:
        record = json.loads(text) if odd else {}
        if odd.isdisjoint(record):
            yield text
            continue
        for name in odd & record.keys():
            type = written.get(name)
            if type is None:
                del record[name]
            elif record[name] is not None:
                converted = text_of(record[name])
                record[name] = json.loads(converted) if type == "json" else converted
        yield json.dumps(record, ensure_ascii=False)


def kept_name(column: str) -> str:
    """Return the output name of an input column. It has the prefix `input_` if an answer column has the same name.

    A column such as `input_text`, whose name an answer column would get, gets another prefix, so names stay different.
    """
    base = column
    while base.startswith("input_"):
        base = base.removeprefix("input_")
    return f"input_{column}" if base in ANSWER_COLUMNS and base != "id" else column


def text_of(value: Any) -> str:
    """Return a JSON value as text. Equal numbers have equal texts, so 1.0 is "1"."""
    value = without_fraction(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return HALVES.sub("\ufffd", text.replace(BYTES, ""))


def bytes_of(value: Any) -> bytes:
    """Return a JSON value as bytes: its own bytes, or its text in UTF-8."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value.startswith(BYTES):
        try:
            return b64decode(value.removeprefix(BYTES), validate=True)
        except ValueError:  # a text of somebody who uses the same mark
            pass
    return text_of(value).encode()


CONVERSIONS: Mapping[Written, Callable[[Any], Any]] = {
    "float": float,
    "text": text_of,
    "json": text_of,
    "bytes": bytes_of,
}


def _written(kinds: ColumnKinds) -> dict[str, Written]:
    """Return the name and type of each input column in the output."""
    types = {name: _type_of(frozenset(values)) for name, values in kinds.items() if not text_fault(name)}
    return {kept_name(name): type for name, type in types.items() if type != "left out" and name != "id"}


def _type_of(kinds: frozenset[Kind]) -> Written:
    match sorted(kinds - MARKS):
        case [*all_kinds] if "blob" in all_kinds:
            return "left out"
        case [*all_kinds] if "bytes" in all_kinds:
            return "bytes"
        case ["int"] | ["long"] | ["int", "long"]:
            return "int"
        case ["float"] | ["float", "int"]:
            return "float"
        case ["bool"]:
            return "bool"
        case ["json"]:
            return "json"
    return "text"


def _is_odd(name: str, kinds: list[Kind]) -> bool:
    """Return whether values of a column change even in JSON, or are left out."""
    type = _type_of(frozenset(kinds))
    return bool(text_fault(name) or MARKS & set(kinds) or type in ("bytes", "left out")) or (
        type == "text" and kinds != ["text"]
    )


def _note(kinds: list[Kind], *, jsonl: bool) -> str:
    """Return how the values of a column differ from the input's, or an empty text if they do not."""
    type = _type_of(frozenset(kinds))
    words = list(dict.fromkeys(WORDS[kind] for kind in kinds if kind not in MARKS))
    notes = []
    usual: tuple[list[str], ...] = ([], [type], ["bytes", "text"])  # some values of a binary column may be UTF-8
    if type in ("text", "bytes") and words not in usual:
        words = ["large integers", "fractions"] if words == ["numbers"] else words
        notes.append(f"{' and '.join(words)}; it is written as {type}")
    if type == "bytes" and jsonl:
        notes.append("bytes; they are written as base64 text")
    if "nested_bytes" in kinds:
        notes.append("bytes inside lists or objects; they are written as base64 text")
    if "half" in kinds:
        notes.append("halves of surrogate pairs; they are written as U+FFFD")
    return ", and ".join(notes)


def _kinds(value: Any, *, escapes: bool) -> tuple[Kind, ...]:
    """Return the kinds of a value. Only a row with escapes can have text that is not valid Unicode."""
    match value:
        case None:
            return ()
        case bool():
            return ("bool",)
        case int():
            return ("int" if value in FLOAT64 else "long" if value in INT64 else "huge",)
        case float():
            return ("float",) if math.isfinite(value) else ()
        case str():
            return _text_kinds(value) if escapes else ("text",)
    return ("json", *_marks(json.dumps(value, ensure_ascii=False))) if escapes else ("json",)


def _text_kinds(text: str) -> tuple[Kind, ...]:
    if text.startswith(BYTES):
        return ("bytes",)
    return ("text", *(kind for kind in _marks(text) if kind != "nested_bytes"))


def _marks(text: str) -> Iterator[Kind]:
    """Yield what a text, or the JSON text of a list or an object, holds besides valid Unicode."""
    if BLOB in text:
        yield "blob"
        return
    if BYTES in text:
        yield "nested_bytes"
    if text_fault(text.replace(BYTES, "")):
        yield "half"

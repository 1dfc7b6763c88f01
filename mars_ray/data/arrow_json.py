"""Convert Arrow columns to JSON values, whatever their type and their values.

In:    an Arrow array of any type, also with values that Python cannot represent.
Out:   one JSON value per element. Dates, times and decimals are text, as Python prints them. Maps are objects if their
       keys are text or numbers, otherwise lists of pairs.
Never: raises because of a value.

In Arrow, a struct column has the fields of all its rows, so a null field of a struct is left out, as if the row did not
have it. Null elements of lists and null values of maps are kept.

Some writers store text as bytes, so bytes that are UTF-8 are text. JSON cannot hold other bytes. They become a text
that begins with `BYTES`, halves of surrogate pairs in the wrong order, which no valid text contains. A reader that uses
such a text therefore refuses it as invalid Unicode.
"""

import base64
import hashlib
import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mars_ray.chat.unicode_text import BLOB, BYTES

BYTES_MAX = 4096
"""Maximum number of bytes to keep of a value that is not UTF-8. Larger values would fill memory and output, because a
row of a job is copied several times."""

types = pa.types
NUMBERS = (types.is_integer, types.is_boolean, types.is_null, types.is_float32, types.is_float64)
LISTS = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
BINARY = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
TEXT = (types.is_string, types.is_large_string, types.is_string_view)


def json_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch. A row has all columns, also those in which it is null."""
    columns = [json_values(column) for column in batch.columns]
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [{}] * batch.num_rows


def json_values(array: pa.Array) -> list[Any]:
    """Return the elements of an array as JSON values."""
    if _is(array.type, NUMBERS):
        return list(array.to_pylist())
    if _is(array.type, TEXT):
        return _texts_or_bytes(array)
    if _is(array.type, BINARY):
        return [text_of_bytes(value) for value in array.to_pylist()]
    if _is(array.type, LISTS):
        return _lists(array)
    if types.is_struct(array.type):
        return _structs(array)
    if types.is_map(array.type):
        return _maps(array)
    if types.is_dictionary(array.type):
        return json_values(array.dictionary_decode())
    if types.is_run_end_encoded(array.type):
        return json_values(pc.run_end_decode(array))
    if types.is_float16(array.type):
        return list(array.cast(pa.float32()).to_pylist())
    if isinstance(array.type, pa.BaseExtensionType) and not isinstance(array.type, pa.UuidType):
        return json_values(array.storage)
    return _printed(array)


def text_of_bytes(value: bytes | None) -> str | None:
    """Return bytes as text: themselves if they are UTF-8, otherwise a text that begins with `BYTES` or `BLOB`."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        pass
    if len(value) > BYTES_MAX:
        return f"{BLOB}{len(value)} bytes, sha256 {hashlib.sha256(value).hexdigest()}"
    return BYTES + base64.b64encode(value).decode()


def _is(type: pa.DataType, predicates: tuple[Any, ...]) -> bool:
    return any(predicate(type) for predicate in predicates)


def _texts_or_bytes(array: pa.Array) -> list[Any]:
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError:  # Arrow does not check text when it reads a file
        return [text_of_bytes(value) for value in array.cast(pa.large_binary()).to_pylist()]


def _lists(array: pa.Array) -> list[Any]:
    elements = iter(json_values(array.flatten()))  # without the elements of null lists
    lengths = pc.list_value_length(array).to_pylist()
    return [None if length is None else list(islice(elements, length)) for length in lengths]


def _structs(array: pa.Array) -> list[Any]:
    names = [field.name for field in array.type]
    columns = [json_values(column) for column in array.flatten()]
    rows = zip(*columns, strict=True) if columns else [()] * len(array)
    return [
        {name: value for name, value in zip(names, row, strict=True) if value is not None} if valid else None
        for valid, row in zip(array.is_valid().to_pylist(), rows, strict=True)
    ]


def _maps(array: pa.Array) -> list[Any]:
    # Arrow's conversion of maps to lists damages maps whose values are maps of nulls, so cut by offsets.
    offsets = array.offsets.to_pylist()
    first, last = offsets[0], offsets[-1]
    keys = json_values(array.keys[first:last])
    pairs = list(zip(keys, json_values(array.items[first:last]), strict=True))
    maps = [
        pairs[begin - first : end - first] if valid else None
        for begin, end, valid in zip(offsets, offsets[1:], array.is_valid().to_pylist(), strict=False)
    ]
    if all(isinstance(key, str | int | float) for key in keys):
        return [None if entries is None else {_key(key): value for key, value in entries} for entries in maps]
    return [None if entries is None else list(map(list, entries)) for entries in maps]


def _key(key: str | float) -> str:
    return key if isinstance(key, str) else json.dumps(key)


def _printed(array: pa.Array) -> list[Any]:
    try:
        return [None if value is None else str(value) for value in array.to_pylist()]
    except Exception:  # a value that Python cannot represent, such as the year 29,000
        return [_printed_scalar(scalar) if scalar.is_valid else None for scalar in array]


def _printed_scalar(scalar: pa.Scalar) -> str:
    conversions: list[Callable[[], Any]] = [
        scalar.as_py,
        lambda: scalar.cast(pa.string()),
        lambda: scalar.cast(pa.int64()),
    ]
    for convert in conversions:
        try:
            return str(convert())
        except Exception:
            continue
    return f"a {scalar.type} that cannot be printed"

"""JSON values of Arrow columns, whatever their type and their values."""

import json
import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.chat.unicode_text import BLOB, BYTES
from mars_ray.data.arrow_json import json_rows, json_values, text_of_bytes
from tests.factories.arrow import any_arrays


@given(any_arrays(), st.integers(0, 5))
def test_every_element_is_a_json_value_that_is_null_only_where_the_element_is(array: pa.Array, start: int) -> None:
    values = json_values(array)
    assert [value is None for value in values] == array.is_null().to_pylist()
    assert json.dumps(json_values(array[start:])) == json.dumps(values[start:])
    assert json.dumps([value for one in range(len(array)) for value in json_values(array[one : one + 1])]) == (
        json.dumps(values)
    )


def test_a_null_field_of_a_struct_is_absent_at_every_depth() -> None:
    rows = [{"tools": [{"a": {"x": 1}, "tags": ["t", None]}]}, {"tools": [{"b": 2}, None]}, {"tools": None}]
    [batch] = pa.Table.from_pylist(rows).to_batches()
    assert json_rows(batch) == rows


def test_maps_are_objects_if_their_keys_are_text_or_numbers() -> None:
    assert json_values(pa.array([[("a", 1), ("b", None)], None], pa.map_(pa.string(), pa.int8()))) == [
        {"a": 1, "b": None},
        None,
    ]
    assert json_values(pa.array([[(6, 0.5)]], pa.map_(pa.int64(), pa.float64()))) == [{"6": 0.5}]
    assert json_values(pa.array([[({"x": 1}, 2)]], pa.map_(pa.struct([("x", pa.int8())]), pa.int8()))) == [
        [[{"x": 1}, 2]]
    ]


def test_a_value_that_python_cannot_represent_does_not_change_the_others() -> None:
    times = pa.array([2**62, 0, None], pa.timestamp("s"))
    assert json_values(times)[1:] == json_values(times[1:]) == ["1970-01-01 00:00:00", None]


def test_text_that_is_not_utf8_is_bytes() -> None:
    offsets, data = pa.py_buffer(b"\0\0\0\0\x01\0\0\0\x02\0\0\0"), pa.py_buffer(b"a\xff")
    assert json_values(pa.Array.from_buffers(pa.string(), 2, [None, offsets, data])) == ["a", BYTES + "/w=="]


@given(st.binary())
def test_bytes_that_are_utf8_are_text_and_others_are_told_apart(value: bytes) -> None:
    text = text_of_bytes(value)
    assert text is not None and (text.startswith(BYTES) or text.encode() == value)
    if text.startswith(BYTES):
        with pytest.raises(UnicodeDecodeError):
            value.decode()


def test_large_bytes_are_replaced_by_their_digest() -> None:
    one, other = text_of_bytes(b"\xff" * 5000), text_of_bytes(b"\xfe" * 5000)
    assert one is not None and other is not None
    assert one != other and one.startswith(BLOB) and len(one) < 100
    assert text_of_bytes(b"a" * 5000) == "a" * 5000


def test_floats_of_every_width_are_numbers() -> None:
    for type in (pa.float16(), pa.float32(), pa.float64()):
        assert json_values(pa.array([1.5, None], type)) == [1.5, None]
    assert math.isnan(json_values(pa.array([math.nan]))[0])

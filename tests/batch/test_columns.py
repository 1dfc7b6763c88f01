"""The schema of the output: one for all rows, however they differ."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.batch.rows.columns import ANSWER_COLUMNS, COLUMNS_MAX, Survey, table_of
from mars_ray.errors import DataError

OURS_GIVEN = {"id": "a", "sample": 0, "prompt": "p", "text": "t", "tokens": 3, "forwards": 2, "tokens_per_forward": 1.5}
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
rows = st.lists(st.dictionaries(st.sampled_from("abcd"), values | st.lists(st.integers(), max_size=2)), max_size=8)


def surveyed(given: list[dict[str, Any]]) -> Survey:
    survey = Survey()
    survey.add(json.dumps(row).encode() for row in given)
    return survey


def meaning(value: Any, kind: pa.DataType, given: Any) -> bool:
    if given is None:
        return value is None
    return bool(value == given) or (kind == pa.string() and json.loads(value) == given)


@given(rows)
def test_every_value_of_every_row_comes_back(given: list[dict[str, Any]]) -> None:
    survey = surveyed(given)
    assert survey.rows == len(given)
    table = table_of([json.dumps(OURS_GIVEN | row) for row in given], survey.kinds)
    for found, row in zip(table.to_pylist(), given, strict=True):
        for name, value in row.items():
            assert meaning(found[name], table.schema.field(name).type, value)


@given(rows, rows)
def test_all_shards_have_one_schema(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    kinds = surveyed(one + other).kinds
    first, second = (table_of([json.dumps(OURS_GIVEN | row) for row in part], kinds) for part in (one, other))
    assert first.schema == second.schema


def test_columns_of_one_kind_keep_it_and_others_become_json_text() -> None:
    kinds = surveyed([{"n": 1, "x": 1, "y": "a", "z": [1]}, {"n": None, "x": 0.5, "y": True, "z": None}]).kinds
    table = table_of([json.dumps(OURS_GIVEN | {"n": 1, "x": 1, "y": True, "z": [1]})], kinds)
    assert table.select(["n", "x", "y", "z"]).to_pylist() == [{"n": 1, "x": 1.0, "y": "true", "z": "[1]"}]


def test_integers_that_no_float_holds_are_kept_beside_floats() -> None:
    given: list[dict[str, Any]] = [{"n": 2**53 + 1, "m": 2**53 + 1}, {"n": 0.5, "m": 1}]
    kinds = surveyed(given).kinds
    table = table_of([json.dumps(OURS_GIVEN | row) for row in given], kinds)
    assert table.select(["n", "m"]).to_pylist() == [{"n": "9007199254740993", "m": 2**53 + 1}, {"n": "0.5", "m": 1}]


def test_a_column_that_has_the_name_of_one_of_ours_is_kept_beside_it() -> None:
    kinds = surveyed([{"id": "a", "text": 7}]).kinds
    table = table_of([json.dumps(OURS_GIVEN | {"input_text": 7})], kinds)
    assert table.schema.names == [*ANSWER_COLUMNS, "input_text"]
    assert table["input_text"].to_pylist() == [7]


def test_logprobs_have_a_type_of_their_own() -> None:
    logprobs = [{"token": 5, "logprob": -0.5, "top": [[5, -0.5], [6, -1.5]]}]
    found = table_of([json.dumps(OURS_GIVEN | {"logprobs": logprobs})], {})["logprobs"].to_pylist()
    assert found == [[{"token": 5, "logprob": -0.5, "top": [[5.0, -0.5], [6.0, -1.5]]}]]


def test_what_is_no_object_is_a_row_too() -> None:
    survey = Survey()
    survey.add([b"no json", b"[1]", b'{"a": 1}'])
    assert (survey.rows, survey.kinds) == (3, {"a": "int"})


def test_rows_with_ever_new_columns_are_refused_with_the_bound() -> None:
    survey = Survey()
    survey.add(json.dumps({f"column {number}": 1}).encode() for number in range(COLUMNS_MAX))
    with pytest.raises(DataError, match="more than 1000 different columns"):
        survey.add([b'{"one more": 1}'])

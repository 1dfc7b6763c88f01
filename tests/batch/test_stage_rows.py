"""Rows of somebody's own pipeline: their columns stay what they are, what they ask and get travels beside them."""

import json

import numpy as np
import pyarrow as pa
import pytest

from mars_ray.batch.rows.row_options import sampling_of
from mars_ray.batch.rows.row_tables import RowResult, from_row_table
from mars_ray.batch.rows.stage_rows import STAGE_COLUMNS, Preprocess, rows_to_answer, with_answers, with_requests
from mars_ray.chat.unicode_text import BYTES
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import ConfigError, RequestError

THEIRS = pa.table({"n": pa.array([1, 2], pa.int16()), "text": ["a", "b"], "tags": pa.array([["x"], None])})
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def answered(*records: dict[str, object]) -> RowResult:
    return RowResult(key=b"", records=tuple(json.dumps(each) for each in records))


def test_their_columns_keep_their_types_and_ours_take_the_place_of_their_namesakes() -> None:
    asked = with_requests(THEIRS, lambda row: {"prompt": row["text"], "sampling": {"seed": np.int64(row["n"])}})
    _, raws = from_row_table(rows_to_answer(asked))
    assert [json.loads(raw) for raw in raws] == [
        {"prompt": "a", "sampling": {"seed": 1}},
        {"prompt": "b", "sampling": {"seed": 2}},
    ]
    refused = RowResult(key=b"", error="{}", reason="too long")
    found = with_answers(asked, [answered({"text": "A", "tokens": 3, "own": 1}), refused], raise_errors=False)
    assert found.schema.field("n").type == pa.int16() and found["tags"].to_pylist() == [["x"], None]
    assert set(found.column_names) == {"n", "tags", *STAGE_COLUMNS}
    assert [found[name].to_pylist() for name in ("text", "tokens", "error")] == [
        ["A", None],
        [3, None],
        [None, "too long"],
    ]
    with pytest.raises(RequestError, match="a row has no answer: too long"):
        with_answers(asked, [answered({}), refused], raise_errors=True)


def test_all_blocks_have_one_schema_whatever_is_in_them() -> None:
    asked = with_requests(THEIRS, lambda row: {"prompt": row["text"]})
    full = with_answers(asked, [answered({"text": "A"}), answered({"text": "B"})], raise_errors=True)
    empty = with_answers(asked.slice(0, 0), [], raise_errors=True)
    assert full.schema == empty.schema


def test_a_row_with_several_answers_is_there_for_each() -> None:
    asked = with_requests(THEIRS, lambda row: {"prompt": row["text"]})
    several = answered({"sample": 0, "text": "A"}, {"sample": 1, "text": "B"})
    found = with_answers(asked, [several, answered({"sample": 0, "text": "C"})], raise_errors=True)
    assert found.select(["n", "sample", "text"]).to_pydict() == {
        "n": [1, 1, 2],
        "sample": [0, 1, 0],
        "text": ["A", "B", "C"],
    }


def test_equal_requests_have_one_id_and_others_another() -> None:
    table = pa.table({"prompt": ["a", "a", "b"]})
    row_ids, _ = from_row_table(rows_to_answer(with_requests(table, None)))
    assert row_ids[0].id == row_ids[1].id != row_ids[2].id
    assert len({each.key for each in row_ids}) == 3


def test_what_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="preprocess returned the unknown field 'samplng'"):
        with_requests(THEIRS, lambda _: {"prompt": "a", "samplng": {}})
    with pytest.raises(ConfigError, match="a request has the set"):
        with_requests(THEIRS, lambda _: {"prompt": {"a"}})
    for sampling, message in (
        ({"temprature": 1}, "sampling has the unknown parameter 'temprature'"),
        ([1], "must be an object"),
        ({"schema": 5}, "schema is 5"),
        ({"schema": SCHEMA, "regex": "a"}, "give only one of"),
        ({"top_k": -1}, "top_k is -1"),
    ):
        with pytest.raises(RequestError, match=message):
            sampling_of("id", {"sampling": sampling}, SamplingParams())


def test_sampling_holds_every_parameter_and_comes_before_columns_and_job() -> None:
    job = SamplingParams(max_tokens=7, temperature=0.5)
    columns = {
        "max_tokens": 5,
        "seed": 1,
        "sampling": {"seed": 2.0, "top_k": 3, "stop": "x", "stop_token_ids": [9], "logit_bias": {"4": -1}, "n": None},
    }
    assert sampling_of("id", columns, job) == SamplingParams(
        max_tokens=5, temperature=0.5, seed=2, top_k=3, stop=("x",), stop_token_ids=frozenset([9]), logit_bias={4: -1}
    )
    grammar = GrammarSpec(kind="json_schema", text=json.dumps(SCHEMA))
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    for sampling in ({"schema": SCHEMA}, {"schema": json.dumps(SCHEMA)}, {"response_format": asked}):
        assert sampling_of("id", {"sampling": sampling}, SamplingParams()).grammar == grammar


TOOLS = [
    {"type": "function", "function": {"name": "a", "parameters": {"properties": {name: {"type": "string"}}}}}
    for name in ("x", "y")
]


@pytest.mark.parametrize(
    "preprocess", [None, lambda row: {name: row[name] for name in ("prompt", "tools", "sampling")}]
)
def test_a_null_field_of_a_struct_is_absent_from_a_request(preprocess: Preprocess | None) -> None:
    rows = [
        {"prompt": "a", "tools": [TOOLS[0]], "sampling": {"logit_bias": {"5": 1.0}}},
        {"prompt": "b", "tools": [TOOLS[1]], "sampling": {"logit_bias": {"6": 2.0}}},
    ]
    requests = with_requests(pa.Table.from_pylist(rows), preprocess)
    _, raws = from_row_table(rows_to_answer(requests))
    assert [json.loads(raw) for raw in raws] == rows


def test_preprocess_sees_null_fields_and_may_return_nulls() -> None:
    table = pa.table({"meta": [{"a": "x", "b": None}, {"a": None, "b": "y"}]})
    requests = with_requests(
        table, lambda row: {"prompt": str(row["meta"]["b"]), "sampling": {"seed": row["meta"]["b"]}}
    )
    _, raws = from_row_table(rows_to_answer(requests))
    assert [json.loads(raw) for raw in raws] == [
        {"prompt": "None", "sampling": {"seed": None}},
        {"prompt": "y", "sampling": {"seed": "y"}},
    ]


@pytest.mark.parametrize("preprocess", [None, lambda row: {"prompt": row["prompt"]}])
def test_columns_that_no_request_uses_pass_through_untouched(preprocess: Preprocess | None) -> None:
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "image": pa.array([{"bytes": b"\x89\xff", "path": None}, None]),
            "day": pa.array([2**62, None], pa.timestamp("s", "Europe/Berlin")),
        }
    )
    requests = with_requests(table, preprocess)
    _, raws = from_row_table(rows_to_answer(requests))
    assert [json.loads(raw) for raw in raws] == [{"prompt": "a"}, {"prompt": "b"}]
    rows = with_answers(requests, [answered({"text": "A"})] * 2, raise_errors=True)
    assert rows.select(table.column_names).equals(table)


def test_bytes_in_a_request_are_text_if_they_are_utf8() -> None:
    requests = with_requests(pa.table({"prompt": [b"a\xc3\xa9", b"\xff"]}), None)
    _, raws = from_row_table(rows_to_answer(requests))
    assert [json.loads(raw) for raw in raws] == [{"prompt": "aé"}, {"prompt": BYTES + "/w=="}]

"""The schema of the output: one for all rows, however they differ."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.batch.output.folder import FileFormat, new_shard, rewritten_shard
from mars_ray.batch.rows.columns import (
    ANSWER_COLUMNS,
    COLUMNS_MAX,
    ColumnKinds,
    Survey,
    kept_name,
    lines_of,
    notes_on,
    output_schema,
    table_of,
    united,
    widened,
)
from mars_ray.batch.rows.row_format import FLOAT64
from mars_ray.chat.unicode_text import BYTES
from mars_ray.data.arrow_json import text_of_bytes
from mars_ray.errors import DataError, RunError

Rows = list[dict[str, Any]]
ANSWER = {"id": "a", "sample": 0, "prompt": "p", "text": "t", "tokens": 3, "forwards": 2, "tokens_per_forward": 1.5}
numbers = st.integers() | st.sampled_from([2**53, 2**53 + 1, -(2**63), 2**63, 2**64 - 1]) | st.floats()
texts = st.text(st.characters(codec="utf-8")) | st.text(st.characters(exclude_categories=()), max_size=3)
binaries = (st.binary(max_size=9) | st.just(b"\xff" * 5000)).map(text_of_bytes)
scalars = st.none() | st.booleans() | numbers | texts | binaries
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(texts, scalars, max_size=2)
names = st.sampled_from(["a", "b", "c", "text", "input_text", "input_input_text", "\ud83d", "", "id"])
any_rows = st.lists(st.dictionaries(names, values), max_size=8)


def surveyed(*parts: Rows) -> ColumnKinds:
    survey = Survey()
    for part in parts:
        for row in part:
            survey.add(json.dumps(row).encode())
    return survey.kinds


def records(rows: Rows) -> list[str]:
    """Return rows as records of the output, which `parse_row` has cleared of NaN."""
    cleared = json.loads(json.dumps(rows), parse_constant=lambda _: None)
    return [
        json.dumps(ANSWER | {kept_name(name): value for name, value in row.items() if name != "id"}) for row in cleared
    ]


def columns(rows: Rows, *names: str) -> Rows:
    return table_of(records(rows), surveyed(rows)).select(list(names)).to_pylist()


def notes(rows: Rows, *, jsonl: bool = False) -> list[str]:
    return list(notes_on(surveyed(rows), jsonl=jsonl))


@given(any_rows, any_rows)
def test_all_shards_have_one_schema(one: Rows, other: Rows) -> None:
    kinds = surveyed(one, other)
    assert table_of(records(one), kinds).schema == table_of(records(other), kinds).schema == output_schema(kinds)


@given(any_rows, any_rows, any_rows)
def test_a_table_that_was_widened_equals_one_of_all_input_at_once(one: Rows, two: Rows, three: Rows) -> None:
    kinds = surveyed(one, two, three)
    table = table_of(records(one), surveyed(one))
    for known in (surveyed(one, two), kinds, kinds):
        table = widened(table, known)
    expected = table_of(records(one), kinds)
    assert (table.schema, table.to_pylist()) == (expected.schema, expected.to_pylist())


@given(any_rows, any_rows)
def test_lines_that_were_widened_equal_those_of_all_input_at_once(one: Rows, other: Rows) -> None:
    kinds = surveyed(one, other)
    lines = list(lines_of(lines_of(records(one), surveyed(one)), kinds))
    assert [json.loads(line) for line in lines] == [json.loads(line) for line in lines_of(records(one), kinds)]
    assert list(lines_of(lines, kinds)) == lines
    "".join(lines).encode()


@given(any_rows, any_rows)
def test_the_kinds_of_two_inputs_are_those_of_both_together(one: Rows, other: Rows) -> None:
    assert united(surveyed(one), surveyed(other)) == surveyed(one, other) == surveyed(other, one)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1))))
def test_columns_of_one_kind_keep_their_values(rows: Rows) -> None:
    kinds = {name: {type(row.get(name)) for row in rows} - {type(None)} for name in "abc"}
    for record, row in zip(table_of(records(rows), surveyed(rows)).to_pylist(), rows, strict=True):
        assert all(record[name] == value for name, value in row.items() if len(kinds[name]) == 1)


@given(st.integers(-(2**53), 2**53))
def test_a_number_that_conflicts_with_text_has_one_text_whatever_its_type(number: int) -> None:
    assert columns([{"k": number}, {"k": float(number)}, {"k": "x"}], "k") == [
        {"k": str(number)},
        {"k": str(number)},
        {"k": "x"},
    ]


def test_values_of_several_kinds_become_text_and_lists_json_text() -> None:
    rows = [{"k": value} for value in (1, 1.5, True, "x", None, [1, "é"], {"a": None})]
    assert [row["k"] for row in columns(rows, "k")] == ["1", "1.5", "true", "x", None, '[1, "é"]', '{"a": null}']
    assert columns([{"z": [1]}, {"z": {"a": "b"}}], "z") == [{"z": "[1]"}, {"z": '{"a": "b"}'}]
    assert notes([{"z": [1]}, {"z": {"a": "b"}}, {"n": 1}, {"n": 1.5}, {"n": None}]) == []
    assert notes([{"k": 1, "z": [1]}, {"k": "x", "z": True}]) == [
        "column 'k' has numbers and text; it is written as text",
        "column 'z' has booleans and lists or objects; it is written as text",
    ]


def test_integers_become_floats_only_if_no_digit_is_lost() -> None:
    rows: Rows = [{"n": FLOAT64[-1] + 1, "m": 2**53 + 1, "f": 1}, {"n": 0.5, "m": 1, "f": 0.5}]
    assert columns(rows, "n", "m", "f") == [
        {"n": "9007199254740993", "m": 2**53 + 1, "f": 1.0},
        {"n": "0.5", "m": 1, "f": 0.5},
    ]
    assert notes(rows) == ["column 'n' has large integers and fractions; it is written as text"]
    assert columns([{"h": 2**64 - 1}, {"h": 1}], "h") == [{"h": "18446744073709551615"}, {"h": "1"}]


def test_bytes_stay_bytes_and_large_ones_are_left_out_by_name() -> None:
    digest, image = text_of_bytes(b"\x89\xff"), text_of_bytes(b"\xff" * 5000)
    rows: Rows = [
        {"digest": digest, "image": image, "photo": {"bytes": image}, "small": {"bytes": digest}},
        {"digest": "text", "image": digest, "photo": None, "small": None},
    ]
    table = table_of(records(rows), surveyed(rows))
    assert table["digest"].to_pylist() == [b"\x89\xff", b"text"]
    assert table["small"].to_pylist() == ['{"bytes": "if8="}', None]
    assert set(table.column_names) == {*ANSWER_COLUMNS, "digest", "small"}
    assert notes(rows) == [
        "column 'image' is left out of the output, because it has binary values of over 4096 bytes",
        "column 'photo' is left out of the output, because it has binary values of over 4096 bytes",
        "column 'small' has bytes inside lists or objects; they are written as base64 text",
    ]
    assert notes([{"digest": digest}]) == []
    assert notes([{"digest": digest}], jsonl=True) == ["column 'digest' has bytes; they are written as base64 text"]
    [line] = lines_of(records([{"digest": digest, "image": image}]), surveyed(rows))
    assert json.loads(line) == ANSWER | {"digest": "if8="}


def test_a_text_with_the_mark_of_bytes_is_written_too() -> None:
    assert columns([{"a": BYTES + "no base64"}], "a") == [{"a": b"no base64"}]


def test_half_of_a_surrogate_pair_is_replaced_and_said_by_name() -> None:
    rows: Rows = [{"note": "a\ud83d", "tags": ["\udc00"], "\ud83d": 1}, {"note": "b", "tags": []}]
    assert columns(rows, "note", "tags") == [{"note": "a\ufffd", "tags": '["\ufffd"]'}, {"note": "b", "tags": "[]"}]
    assert notes(rows) == [
        "column 'note' has halves of surrogate pairs; they are written as U+FFFD",
        "column 'tags' has halves of surrogate pairs; they are written as U+FFFD",
        r"column '\ud83d' is left out of the output, because its name has half of a surrogate pair",
    ]
    [line, _] = lines_of(records(rows), surveyed(rows))
    assert json.loads(line) == ANSWER | {"note": "a\ufffd", "tags": ["\ufffd"]}


def test_lines_are_left_as_they_are_where_json_can_hold_the_values() -> None:
    texts = records([{"k": 1, "z": [1.0]}, {"k": 1.5, "new": True}])
    assert list(lines_of(texts, surveyed([{"k": 1, "z": [1.0]}, {"k": 1.5, "new": True}]))) == texts
    mixed = surveyed([{"k": 1}, {"k": "x"}])
    assert [json.loads(line)["k"] for line in lines_of(texts, mixed)] == ["1", "1.5"]


@given(st.sets(st.text("_abt") | st.sampled_from([*ANSWER_COLUMNS, "input_text", "input_input_text", "input_id"])))
def test_columns_keep_different_names_that_no_answer_column_has(names: set[str]) -> None:
    kept = {kept_name(name) for name in names - {"id"}}
    assert len(kept) == len(names - {"id"}) and kept.isdisjoint(ANSWER_COLUMNS)


def test_logprobs_have_a_type_of_their_own() -> None:
    logprobs = [{"token": 5, "logprob": -0.5, "top": [[5, -0.5], [6, -1.5]]}]
    written = table_of([json.dumps(ANSWER | {"logprobs": logprobs})], {})["logprobs"].to_pylist()
    assert written == [[{"token": 5, "logprob": -0.5, "top": [[5.0, -0.5], [6.0, -1.5]]}]]


def test_what_is_no_object_is_a_row_too() -> None:
    survey = Survey()
    assert [survey.add(raw) for raw in (b"no json", b"[1]", b'{"a": 1}')] == [None, None, {"a": 1}]
    assert (survey.rows, survey.kinds) == (3, {"a": ["int"]})


def test_rows_with_ever_new_columns_are_refused_with_the_bound() -> None:
    survey = Survey()
    for number in range(COLUMNS_MAX):
        survey.add(json.dumps({f"column {number}": 1}).encode())
    with pytest.raises(DataError, match="more than 1000 different columns"):
        survey.add(b'{"one more": 1}')


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_shard_is_rewritten_only_if_the_kinds_change_it(format: FileFormat, tmp_path: Path) -> None:
    path = tmp_path / f"part-00000.{format}"
    texts = records([{"k": 1}, {"k": 2}])

    def written(*rows: dict[str, Any]) -> ColumnKinds:
        return surveyed([{"k": 1}, *rows])

    path.write_bytes(new_shard(texts, written(), format))
    assert rewritten_shard(path, written({"k": 2**60})) is None
    assert rewritten_shard(path, written({"k": "x"})) == new_shard(texts, written({"k": "x"}), format)
    path.write_bytes(path.read_bytes()[:-9] + b"\xff")
    with pytest.raises(RunError, match=r"part-00000\.\w+ is damaged: .* Restore the file"):
        rewritten_shard(path, written({"k": "x"}))
    path.unlink()
    assert rewritten_shard(path, written({"k": "x"})) is None

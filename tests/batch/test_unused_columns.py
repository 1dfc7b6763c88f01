"""Columns that nobody uses: whatever they hold, rows are answered as without them."""

import json
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from mars_ray.batch.rows.columns import ANSWER_COLUMNS, Survey, output_schema, table_of
from mars_ray.batch.rows.plain_format import PlainFormat, PlainFormatSettings
from mars_ray.batch.rows.row_format import parse_row
from mars_ray.batch.rows.row_tables import as_json
from mars_ray.data.arrow_json import json_rows
from mars_ray.data.record_file import read_records
from mars_ray.engine.chunk import Chunk, Finished
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import BadRecordError
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.arrow import any_arrays

ROWS = 3
PROMPTS = ["one?", "two?", "three?"]
ANSWER = Chunk(
    request_id="",
    index=0,
    pieces=("so",),
    tokens=(5,),
    threshold=0.9,
    finished=Finished(reason="stop", prompt_tokens=4, cached_tokens=0, tokens=1, forwards=1, queued_s=0.0),
)
COLUMNS = ("image", "text", "input_text", "prompt_logprobs", "", "a b", "created", "row")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner),
    max_leaves=5,
)


@pytest.fixture(scope="module", params=[None, "{{ prompt }}"], ids=["prompt", "template"])
def row_format(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> PlainFormat:
    settings = PlainFormatSettings(sampling=SamplingParams(), decode=DecodeParams(), template=request.param)
    return PlainFormat(settings, checkpoint.tokenizer)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    return checkpoint.tokenizer


def check_rows(row_format: PlainFormat, raws: list[bytes]) -> pa.Table:
    """Check that the requests are those of rows with only a prompt, and return the output."""
    plain = [row_format.parse("a", json.dumps({"prompt": prompt}).encode()).request for prompt in PROMPTS]
    rows = [row_format.parse("a", raw) for raw in raws]
    assert [row.request for row in rows] == plain
    survey = Survey()
    for raw in raws:
        survey.add(raw)
    texts = [as_json(record) for row in rows for record in row_format.output_records(row, [ANSWER])]
    table = table_of(texts, survey.kinds)
    assert table.schema == output_schema(survey.kinds)
    assert table["text"].to_pylist() == ["so"] * ROWS
    pq.write_table(table, BytesIO())
    return table


@given(columns=st.dictionaries(st.sampled_from(COLUMNS), any_arrays(ROWS), max_size=3))
def test_any_parquet_schema_with_unused_columns_leaves_rows_alone(
    row_format: PlainFormat, columns: dict[str, pa.Array]
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.parquet"
        try:
            pq.write_table(pa.table({"prompt": PROMPTS} | columns), path)
            stored = pq.read_table(path)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            stored = None  # parquet does not have this type, or not these values
        assume(stored is not None)
        [raws] = read_records(path, ROWS)
        check_rows(row_format, raws)


@given(columns=st.dictionaries(st.sampled_from(COLUMNS), any_arrays(ROWS), max_size=3))
def test_any_arrow_schema_with_unused_columns_leaves_rows_alone(
    row_format: PlainFormat, columns: dict[str, pa.Array]
) -> None:
    batch = pa.record_batch({"prompt": pa.array(PROMPTS)} | columns)
    check_rows(row_format, [json.dumps(row).encode() for row in json_rows(batch)])


@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from([*COLUMNS, "\ud83d"]), json_values, max_size=3), min_size=ROWS, max_size=ROWS
    )
)
def test_any_jsonl_with_unused_columns_leaves_rows_alone(row_format: PlainFormat, rows: list[dict[str, Any]]) -> None:
    raws = [json.dumps(row | {"prompt": prompt}).encode() for row, prompt in zip(rows, PROMPTS, strict=True)]
    check_rows(row_format, raws)


def test_images_and_digests_of_a_data_set(row_format: PlainFormat, tmp_path: Path) -> None:
    image = pa.array([{"bytes": b"\x89\xff" * 4000, "path": None}] * ROWS)
    digests = pa.array([b"\x89\xff\x00\x01", None, b"abcd"], pa.binary(4))
    pq.write_table(pa.table({"prompt": PROMPTS, "image": image, "digest": digests}), tmp_path / "a.parquet")
    [raws] = read_records(tmp_path / "a.parquet", ROWS)
    table = check_rows(row_format, raws)
    assert set(table.column_names) - set(ANSWER_COLUMNS) == {"digest", "input_prompt"}
    assert table["digest"].to_pylist() == digests.to_pylist()


def test_a_template_that_prints_bytes_fails_only_their_rows(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    settings = PlainFormatSettings(sampling=SamplingParams(), decode=DecodeParams(), template="{{ data }}")
    pq.write_table(pa.table({"data": [b"why?", b"\xff"]}), tmp_path / "a.parquet")
    [[good, bad]] = read_records(tmp_path / "a.parquet", ROWS)
    row_format = PlainFormat(settings, tokenizer)
    assert row_format.parse("a", good).prompt_text == "why?"
    with pytest.raises(BadRecordError, match="it prints bytes that are not UTF-8 text"):
        row_format.parse("a", bad)


def test_options_from_structs_that_differ_from_row_to_row(row_format: PlainFormat, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "sampling": {"logit_bias": {"5": 1.0}, "schema": None}},
        {"prompt": "b", "sampling": {"logit_bias": {"6": 2.0}}},
        {"prompt": "c", "sampling": {"schema": {"type": "object", "properties": {"x": {"type": "string"}}}}},
        {"prompt": "d", "sampling": {"schema": {"type": "object", "properties": {"y": {"type": "number"}}}}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    [raws] = read_records(tmp_path / "a.parquet", 10)
    for raw, row in zip(raws, rows, strict=True):
        assert row_format.parse("a", raw).request == row_format.parse("a", json.dumps(row).encode()).request


def test_tools_from_structs_that_differ_from_row_to_row(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "a",
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": name,
                        "parameters": {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]},
                    },
                }
            ],
        }
        for name in ("city", "date")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    [raws] = read_records(tmp_path / "a.parquet", 10)
    assert [parse_row(raw) for raw in raws] == rows

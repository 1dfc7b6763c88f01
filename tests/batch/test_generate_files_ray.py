"""Data sets through Ray Data: every row once, bad ones explained, unusable input refused, stopped jobs resumed."""

import gzip
import json
import re
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM
from upath import UPath

from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import (
    ClusterError,
    ConfigError,
    DataError,
    EmptyDataError,
    InputError,
    ModelError,
    OutputError,
    RunError,
)
from mars_ray.model.card import write_card
from mars_ray.storage.location import AnyPath
from tests.factories.cards import model_card
from tests.factories.jobs import ONE_WORKER, generate_options

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
SAMPLING, DECODE = SamplingParams(max_tokens=5), DecodeParams(threshold=0.5, block=4)
# In UTF-8, å, 全 and the rest hold bytes or are characters that end a line in other alphabets.
GOOD: list[dict[str, Any]] = [
    {"id": f"row-{number}", "prompt": f"å 全 \x0b \u2028 {number}", "own": number} for number in range(150)
]
BAD = {
    b'{"id": "json", "prompt":': "not JSON",
    b'{"id": "utf8", "prompt": "\xff"}': "not JSON",
    b'{"id": "none"}': "neither",
    b'{"id": 12, "prompt": 3}': "must be text, not int",
    b'{"id": "long", "prompt": "' + b"x" * 130 + b'"}': "the prompt has 133 tokens",
    b'{"id": "row-0", "prompt": "again"}': "an earlier row has the same id 'row-0'",
}


def lines(*, bad: bool = True) -> bytes:
    found = [json.dumps(row, ensure_ascii=False).encode() for row in GOOD]
    if bad:
        for place, line in enumerate(BAD):
            found.insert(25 * place + 1, line)
    return b"\n\r\n".join(found)


def answered(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "rows").to_pylist()
    return sorted(rows, key=lambda row: (len(row["id"]), row["id"]))


def errors_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "errors.jsonl").read_text(encoding="utf-8").splitlines()]


def options(source: AnyPath, output: AnyPath, model: Path, **changes: Any) -> GenerateOptions:
    return generate_options(source, output, model, **({"sampling": SAMPLING, "decode": DECODE} | changes))


@pytest.mark.slow
def test_rows_of_a_store_are_answered_into_a_store_each_once(model_folder: Path, bucket: UPath) -> None:
    source, output = bucket / "rows.jsonl.gz", bucket / "out"
    source.write_bytes(gzip.compress(lines()))
    report = generate_files(options(source, output, model_folder))
    tables = [pq.read_table(BytesIO(path.read_bytes())) for path in output.glob("rows/part-*")]
    assert sorted(pa.concat_tables(tables)["id"].to_pylist()) == sorted(row["id"] for row in GOOD)
    (errors,) = output.glob("errors-*.jsonl")
    assert len(errors.read_text().splitlines()) == len(BAD)
    assert (report.rows, report.output) == (len(GOOD) + len(BAD), str(output))
    assert "<html" in (output / "report.html").read_text()


def test_good_rows_are_answered_once_and_bad_ones_explained(model_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl.gz", tmp_path / "out"
    source.write_bytes(gzip.compress(lines()))
    report = generate_files(options(source, output, model_folder, workers=replace(ONE_WORKER, count=2)))
    rows = answered(output)
    assert [(row["id"], row["prompt"], row["own"]) for row in rows] == [
        (row["id"], row["prompt"], row["own"]) for row in GOOD
    ]
    errors = {error["row"]: error["reason"] for error in errors_in(output)}
    assert len(errors) == len(BAD)
    for raw, reason in BAD.items():
        assert reason in errors[raw.decode(errors="replace")]
    assert (report.status, report.rows, report.total, report.errors) == ("complete with errors", 156, 156, 6)
    assert report.tokens == sum(row["tokens"] for row in rows)
    assert json.loads((output / "report.json").read_text())["tokens"] == report.tokens
    page = (output / "report.html").read_text()
    assert any(row["id"] in page for row in rows)


@pytest.mark.slow
def test_the_same_call_leaves_what_is_done_as_it_is_and_does_what_was_added_to_the_input(
    model_folder: Path, tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    (source / "a.jsonl").write_bytes(lines(bad=False))
    first = generate_files(options(source, output, model_folder, limit=100))
    assert (first.rows, first.total) == (100, 100)
    rows = answered(output)
    (source / "b.jsonl").write_text('{"id": "new", "prompt": "x"}')
    last = generate_files(options(source, output, model_folder))
    assert (last.rows, last.runs, last.status) == (151, 2, "complete")
    found = answered(output)
    assert sorted(row["id"] for row in found) == sorted([*(row["id"] for row in GOOD), "new"])
    assert [row for row in found if row["id"] in {each["id"] for each in rows}] == rows


@pytest.mark.slow
def test_tokens_and_rows_under_way_are_shown_before_the_first_row_is_done(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoConfig.from_pretrained(model_folder)
    config.update({"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 30, "layer_types": None})
    slow = shutil.copytree(model_folder, tmp_path / "slow")
    Qwen2ForCausalLM(Qwen2Config(**config.to_dict())).save_pretrained(slow)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(32)))
    sampling, decode = SamplingParams(max_tokens=100, ignore_eos=True), DecodeParams(mode=Mode.AR)
    report = generate_files(options(source, tmp_path / "out", slow, sampling=sampling, decode=decode))
    assert report.settings["dtype_reason"], "the report says why the dtype is what it is"
    said = capsys.readouterr().err
    assert re.search(r"^generate: starting workers, which load the model  ", said, re.MULTILINE)
    assert re.search(r"^generate: 0/32  \d+ running  [1-9]\d* tokens  ", said, re.MULTILINE)


@pytest.mark.slow
def test_a_job_that_goes_on_keeps_its_dtype(model_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out"
    source.write_text('{"prompt": "x"}')
    for dtype in ("bfloat16", "auto"):
        workers = replace(ONE_WORKER, dtype=dtype)
        assert generate_files(options(source, output, model_folder, workers=workers)).settings["dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match="dtype was"):
        generate_files(options(source, output, model_folder, workers=replace(ONE_WORKER, dtype="float32")))


@pytest.mark.slow
def test_other_settings_are_refused_unless_the_job_is_new(model_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out"
    source.write_text('{"prompt": "x"}')
    generate_files(options(source, output, model_folder))
    other = SamplingParams(max_tokens=6)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens was 5, now it is 6"):
        generate_files(options(source, output, model_folder, sampling=other))
    changed = shutil.copytree(model_folder, tmp_path / "changed")
    (changed / "generation_config.json").write_text("{}")
    with pytest.raises(ConfigError, match='model was "'):
        generate_files(options(source, output, changed))
    report = generate_files(options(source, output, model_folder, sampling=other, new=True))
    assert report.rows == 1
    [before] = answered(tmp_path / "out.before-1")
    assert before["tokens"] <= 5
    assert before["id"] == answered(output)[0]["id"], "the outputs can be joined"


@pytest.mark.slow
def test_rows_of_parquet_keep_their_columns_and_say_how_they_are_to_be_decoded(
    model_folder: Path, tmp_path: Path
) -> None:
    source, output = tmp_path / "rows.parquet", tmp_path / "out"
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "3"},
    ]
    rows = [
        {"id": "plain", "prompt": "x", "messages": None, "n": None, "max_tokens": None, "tag": ["a", "b"]},
        {"id": "talk", "prompt": None, "messages": talk, "n": 2, "max_tokens": 3, "tag": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), source)
    generate_files(options(source, output, model_folder))
    found = answered(output)
    assert [(row["id"], row["sample"], row["prompt"]) for row in found] == [
        ("talk", 0, "3"),
        ("talk", 1, "3"),
        ("plain", 0, "x"),
    ]
    assert [row["tokens"] <= most for row, most in zip(found, (3, 3, 5), strict=True)] == [True] * 3
    assert json.loads(found[2]["tag"]) == ["a", "b"]
    assert json.loads(found[0]["messages"]) == talk


@pytest.mark.slow
def test_openai_batch_files_are_answered_in_their_own_form(model_folder: Path, tmp_path: Path) -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "temperature": 0}
    request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    given = [{"custom_id": f"r{number}"} | request for number in range(3)]
    given.append({"custom_id": "bad"} | request | {"body": body | {"n": "many"}})
    source, output = tmp_path / "batch.jsonl", tmp_path / "out"
    source.write_text("\n".join(json.dumps(line) for line in given))
    with pytest.raises(ConfigError, match="max_tokens: the input is an OpenAI batch file"):
        generate_files(options(source, output, model_folder, sampling=SamplingParams(max_tokens=7)))
    report = generate_files(options(source, output, model_folder, sampling=None))
    assert (report.rows, report.errors) == (4, 1)
    [path] = (output / "rows").iterdir()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["custom_id"] for line in found) == ["r0", "r1", "r2"]
    assert all(line["response"]["body"]["usage"]["completion_tokens"] > 0 for line in found)
    [error] = errors_in(output)
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)


def test_more_than_the_cluster_has_is_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}')
    with pytest.raises(
        ClusterError, match="3 workers with 1 CPU each do not fit into the cluster, whose nodes have 2 CPU"
    ):
        generate_files(
            options(tmp_path / "rows.jsonl", tmp_path / "out", model_folder, workers=replace(ONE_WORKER, count=3))
        )
    with pytest.raises(ClusterError, match="A worker with 1 CPU and 3 GPU does not fit"):
        generate_files(
            options(tmp_path / "rows.jsonl", tmp_path / "out", model_folder, workers=replace(ONE_WORKER, gpus=3))
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_only_a_worker_finds_is_said_in_its_words_and_leaves_nothing(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}')
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    write_card(model_card(mask_token_id=5), broken)
    with pytest.raises(RunError, match=r"has id 5, the tokenizer says 260.*belongs to another checkpoint"):
        generate_files(options(tmp_path / "rows.jsonl", tmp_path / "out", broken))
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_with_the_arguments_is_said_before_ray_starts(model_folder: Path, tmp_path: Path) -> None:
    rows, output, other = tmp_path / "rows.jsonl", tmp_path / "out", tmp_path / "other"
    rows.write_text('{"prompt": "x"}')
    (tmp_path / "rows.csv").touch()
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "bad.jsonl.gz").write_text("no gzip")
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(lines())[:-20])
    (tmp_path / "blank.jsonl").write_text("\n\n")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    other.mkdir()
    broken = shutil.copytree(model_folder, other / "broken")
    (broken / "mars.json").write_text("{}")
    cases: list[tuple[GenerateOptions, type[InputError], str]] = [
        (options(tmp_path / "none.jsonl", output, model_folder), DataError, "no file .*none.jsonl"),
        (options(other, output, model_folder), DataError, "holds no file whose name ends with"),
        (options(tmp_path / "rows.csv", output, model_folder), DataError, "rows.csv"),
        (options(tmp_path / "bad.parquet", output, model_folder), DataError, "bad.parquet cannot be read"),
        (options(tmp_path / "bad.jsonl.gz", output, model_folder), DataError, "bad.jsonl.gz cannot be read"),
        (options(tmp_path / "half.jsonl.gz", output, model_folder), DataError, "half.jsonl.gz cannot be read"),
        (options(tmp_path / "blank.jsonl", output, model_folder), EmptyDataError, "blank.jsonl holds no rows"),
        (options(tmp_path / "empty.parquet", output, model_folder), EmptyDataError, "empty.parquet holds no rows"),
        (options(rows, output, tmp_path / "tiny"), ModelError, "unknown model"),
        (options(rows, output, tmp_path), ModelError, "no config.json"),
        (options(rows, output, broken), ModelError, "not a valid card"),
        (options(rows, other, model_folder), OutputError, "has files that do not belong to a job"),
        (options(rows, output, model_folder, workers=replace(ONE_WORKER, count=0)), ConfigError, "workers is 0"),
        (options(rows, output, model_folder, limit=0), ConfigError, "limit is 0"),
        (options(rows, output, model_folder, workers=replace(ONE_WORKER, cpus=-1.0)), ConfigError, "cpus is -1"),
        (options(rows, output, model_folder, template="{{ x"), ConfigError, "line 1"),
    ]
    for given, kind, message in cases:
        with pytest.raises(kind, match=message):
            generate_files(given)
    assert not output.exists()


@pytest.mark.slow  # `test_widened_output.py` tests the rule without a cluster
def test_input_that_grows_by_another_type_and_a_column_gives_one_table(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    options = generate_options(tmp_path / "in", tmp_path / "out", model_folder, sampling=SAMPLING, decode=DECODE)
    first = pa.table({"id": [1.0, None], "prompt": ["a", "b"], "k": [1, 2], "image": [b"\x89\xff" * 4000] * 2})
    pq.write_table(first, tmp_path / "in" / "a.parquet")
    assert generate_files(options).status == "complete"
    (tmp_path / "in" / "b.jsonl").write_text('{"id": "3", "prompt": "c", "k": "x", "note": "\\ud83d", "new": [1]}\n')
    report = generate_files(options)
    assert (report.status, report.rows, report.errors) == ("complete", 3, 0)
    assert "column 'k' has numbers and text; it is written as text" in report.notes
    table = pq.read_table(options.output / "rows").sort_by("k")
    assert table.select(["k", "note", "new"]).to_pylist() == [
        {"k": "1", "note": None, "new": None},
        {"k": "2", "note": None, "new": None},
        {"k": "x", "note": "\ufffd", "new": "[1]"},
    ]
    assert (table["id"][0].as_py(), "image" in table.column_names) == ("1", False)

"""The whole way from a file to packed rows, on a small real Ray cluster."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from upath import UPath

from mars_ray.data import ray_prepare
from mars_ray.data.chat import ChatEncoder, Encoded
from mars_ray.data.packed import PackedData, PackReport, read_report
from mars_ray.data.packing import Packer
from mars_ray.data.ray_prepare import PrepareOptions, prepare
from mars_ray.data.records import parse_record
from mars_ray.data.source_version import version_of
from mars_ray.errors import BadRecordError, ConfigError, DataError, EmptyDataError, ModelError, RunError
from mars_ray.model.folder import check_folder
from mars_ray.model.sources.ray_folder import share_folder
from mars_ray.progress import ProgressLine
from tests.data.data_samples import CHATML, make_tokenizer
from tests.factories.networks import tiny_network

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
# More than one block of the pipeline, with what ends a line elsewhere: U+0085, a byte of "ą", and U+2028.
RECORDS = [{"prompt": f"ą\u2028 say {n}", "response": "one two " * (n % 9 + 1)} for n in range(2500)]
LENGTH = 64
OPTIONS = PrepareOptions(length=LENGTH, overlong="drop")
PROGRESS = ProgressLine("tokenise", total=None)


def model_folder(folder: Path, template: str | None = CHATML) -> Path:
    tiny_network().save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def packed(source: Path, model: Path, **changes: Any) -> PackReport:
    return prepare(source, source.with_suffix(".packed"), model, replace(OPTIONS, **changes), PROGRESS)


def rows_of(source: Path) -> bytes:
    return (source.with_suffix(".packed") / "rows.parquet").read_bytes()


@pytest.fixture(scope="module")
def prepared(cluster: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PackReport]:
    source = tmp_path_factory.mktemp("data") / "plain.jsonl"
    source.write_bytes(lines(RECORDS))
    return source, packed(source, model)


def test_the_rows_are_those_of_encoding_and_packing_in_order(prepared: tuple[Path, PackReport]) -> None:
    source, report = prepared
    packer, rows = Packer(LENGTH), []
    for outcome in ChatEncoder(make_tokenizer()).encode([parse_record(lines([record])) for record in RECORDS]):
        assert isinstance(outcome, Encoded)
        rows += packer.add(outcome)
    rows += packer.finish()
    data = PackedData(source.with_suffix(".packed"))
    read = data.rows(range(len(data)))
    for r, row in enumerate(rows):
        assert read.tokens_RT[r, : row.tokens].tolist() == [t for each in row.examples for t in each.tokens]
        assert read.response_RT[r, : row.tokens].tolist() == [m for each in row.examples for m in each.response]
    assert report == read_report(source.with_suffix(".packed")) == data.report
    assert report == replace(
        report,
        records=len(RECORDS),
        source=version_of(source),
        dropped=0,
        drop_reasons=(),
        truncated=0,
        examples=packer.examples,
        tokens=packer.tokens,
        response_tokens=packer.response_tokens,
        rows=len(rows),
        length=LENGTH,
        fill=packer.tokens / (len(rows) * LENGTH),
        tokens_per_s=report.tokens / report.seconds,
    )


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_every_form_of_the_same_records_gives_the_same_bytes(
    kind: str, prepared: tuple[Path, PackReport], model: Path, tmp_path: Path
) -> None:
    source = tmp_path / f"again.{kind}"
    if kind == "parquet":
        messages = [{"messages": parse_record(lines([record])).messages} for record in RECORDS]
        pq.write_table(pa.Table.from_pylist(messages), source)
    else:
        source.write_bytes(gzip.compress(lines(RECORDS)) if kind == "jsonl.gz" else lines(RECORDS))
    packed(source, model)
    assert rows_of(source) == rows_of(prepared[0])


def test_records_in_a_store_give_the_same_bytes(
    prepared: tuple[Path, PackReport], model: Path, tmp_path: Path, bucket: UPath
) -> None:
    source = bucket / "again.jsonl.gz"
    source.write_bytes(gzip.compress(lines(RECORDS)))
    prepare(source, tmp_path / "again.packed", model, OPTIONS, PROGRESS)
    assert rows_of(tmp_path / "again") == rows_of(prepared[0])


def test_a_bad_record_is_named_by_file_number_and_reason(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_bytes(lines(RECORDS[:1500]) + b"\n" + lines([{"text": "a"}]) + lines(RECORDS[1500:]))
    with pytest.raises(BadRecordError, match=r"bad\.jsonl, record 1501: it has neither .* raise max_dropped"):
        packed(source, model, max_dropped=0)
    assert read_report(source.with_suffix(".packed")) is None


def test_bad_and_overlong_records_are_counted_and_the_others_go_on(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "mixed.jsonl"
    overlong = [{"prompt": "a", "response": "b" * LENGTH}] * 2 + [{"prompt": "a" * LENGTH, "response": "b"}]
    source.write_bytes(b"[]\n" + lines(RECORDS[:10]) + b"\xff\n" + lines([{"prompt": "a"}, *overlong]))
    dropping = packed(source, model, max_dropped=0.5)
    assert (dropping.records, dropping.examples, dropping.dropped, dropping.truncated) == (16, 10, 6, 0)
    assert dropping.losses("mixed.jsonl") == (
        "mixed.jsonl: 6 of 16 records dropped: 3 x it is longer than 64 tokens (first: record 14), 1 x it is not a "
        "JSON object but b'[]' (first: record 1), 1 x it is not JSON ('utf-8' codec can't decode byte 0xff in position "
        "0: invalid start byte): b'\\xff' (first: record 12), 1 x for other reasons"
    )
    truncating = packed(source, model, max_dropped=0.5, overlong="truncate")
    # The prompt that fills a row leaves no place for its response.
    assert (truncating.examples, truncating.dropped, truncating.truncated) == (12, 4, 2)
    assert truncating.losses("mixed.jsonl").endswith("; 2 truncated to 64 tokens")
    assert truncating.tokens == dropping.tokens + 2 * LENGTH


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 of 0 records"),
        (b"{}\n[]\n", "2 of 2 records dropped: 1 x it has neither"),
        (lines([{"prompt": "a", "response": "b" * LENGTH}]), f"1 x it is longer than {LENGTH} tokens"),
    ],
)
def test_nothing_to_learn_from_is_an_empty_data_error(content: bytes, reason: str, model: Path, tmp_path: Path) -> None:
    source = tmp_path / "empty.jsonl"
    source.write_bytes(content)
    with pytest.raises(EmptyDataError, match=reason):
        packed(source, model, max_dropped=1)


def test_more_than_a_tenth_dropped_is_an_error_that_names_the_reasons(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "many.jsonl"
    source.write_bytes(lines(RECORDS[:9]) + lines([{"prompt": "a", "response": ""}]))
    assert packed(source, model).dropped == 1
    source.write_bytes(lines(RECORDS[:8]) + lines([{"prompt": "a"}]) * 2)
    message = (
        r"many\.jsonl: 2 of 10 records dropped: 2 x it has no 'response' or 'completion' to its 'prompt' "
        r"\(first: record 9\)\. That is 20\.0%, and max_dropped allows 10\.0%"
    )
    with pytest.raises(DataError, match=message):
        packed(source, model)
    assert read_report(source.with_suffix(".packed")) is None


def test_rows_longer_than_the_context_of_the_model_are_refused(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "long.jsonl"
    source.write_bytes(lines(RECORDS[:3]))
    positions = check_folder(model).max_positions
    with pytest.raises(ConfigError, match=rf"length is {positions + 1}, but the context .* has {positions} tokens"):
        packed(source, model, length=positions + 1)


def test_rows_longer_than_the_sliding_window_of_the_model_are_refused(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "long.jsonl"
    source.write_bytes(lines(RECORDS[:3]))
    windowed = shutil.copytree(model, tmp_path / "windowed")
    settings = json.loads((windowed / "config.json").read_text()) | {"sliding_window": 32}
    (windowed / "config.json").write_text(json.dumps(settings | {"use_sliding_window": False}))
    packed(source, windowed, length=64)
    layers = ["full_attention", "sliding_attention"] * settings["num_hidden_layers"]
    used = {"use_sliding_window": True, "layer_types": layers[: settings["num_hidden_layers"]]}
    (windowed / "config.json").write_text(json.dumps(settings | used))
    with pytest.raises(ConfigError, match="length is 64, but layers of the model see only the last 32 tokens"):
        packed(source, windowed, length=64)
    packed(source, windowed, length=32)


def test_a_template_that_no_record_gets_through_is_named(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(RECORDS[:3]))
    unended = model_folder(tmp_path / "model", CHATML.replace("<|im_end|>", ""))
    with pytest.raises(BadRecordError, match=r"record 1: .*without the end-of-sequence token '<\|im_end\|>'"):
        packed(source, unended, max_dropped=0)


def test_what_cannot_be_read_or_tokenised_is_refused_before_ray_works(tmp_path: Path, model: Path) -> None:
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS))[:-9])
    (tmp_path / "good.jsonl").write_bytes(lines(RECORDS))
    with pytest.raises(DataError, match="cannot be read"):
        packed(tmp_path / "half.jsonl.gz", model)
    with pytest.raises(ModelError, match="chat template"):
        packed(tmp_path / "good.jsonl", model_folder(tmp_path / "mute", None))
    assert not list(tmp_path.glob("*.packed"))


def test_a_file_that_breaks_while_it_is_read_is_a_data_error_of_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_prepare, "check_source", lambda source: None)  # it was whole when it was looked at
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS))[:-9])
    with pytest.raises(DataError, match=r"half\.jsonl\.gz cannot be read: Truncated compressed stream") as caught:
        packed(tmp_path / "half.jsonl.gz", model)
    assert "\n" not in str(caught.value)


def test_workers_that_fail_for_another_reason_are_a_run_error_of_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(lines(RECORDS[:3]))
    gone = model_folder(tmp_path / "model")
    ray_prepare._encoder(share_folder(gone))
    (gone / "tokenizer.json").write_text("{}")  # the driver has it, the workers do not
    with pytest.raises((RunError, ModelError)) as caught:
        packed(tmp_path / "good.jsonl", gone)
    assert "\n" not in str(caught.value)

"""Files of rows through Ray Data: good rows are answered, bad ones explained, unusable input refused."""

import gzip
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from mars_ray.batch.generator import Generator
from mars_ray.batch.outcomes import OUTPUT_SCHEMA
from mars_ray.batch.ray_generate import GenerateOptions, generate
from mars_ray.engine.options import EngineOptions
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
from mars_ray.model.card import Card, write_card
from mars_ray.model.checkpoint import load_checkpoint

pytestmark = pytest.mark.ray
DECODE = DecodeParams(threshold=0.5, block=4)
SAMPLING = SamplingParams(max_tokens=5)
CARD = Card(
    method="mars",
    block=4,
    phase="absolute",
    mask_token="<|mask|>",
    mask_token_id=5,
    ar_weight=1.0,
    data="none",
    examples=1,
    tokens=1,
    steps=1,
    seed=1,
    versions={},
    losses={},
)
# In UTF-8, å, 全 and the rest hold bytes or are characters that end a line in other alphabets.
GOOD = [{"id": f"row-{number}", "prompt": f"å 全 \x0b \u2028 {number}"} for number in range(150)]
BAD = {
    b'{"id": "json", "prompt":': (None, "not JSON"),
    b'{"id": "utf8", "prompt": "\xff"}': (None, "not JSON"),
    b'{"id": "none"}': ("none", "neither 'prompt' nor 'messages'"),
    b'{"id": 12, "prompt": 3}': ("12", "must be text, not int"),
    b'{"id": "long", "prompt": "' + b"x" * 130 + b'"}': ("long", "the prompt has 133 tokens"),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    yield
    ray.shutdown()


def mixed_lines() -> bytes:
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in GOOD]
    for place, bad in enumerate(BAD):
        lines.insert(30 * place, bad)
    return b"\n\r\n".join(lines)


def answered(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def errors_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "errors.jsonl").read_text(encoding="utf-8").splitlines()]


def options(source: Path, output: Path, model: Path, **changes: Any) -> GenerateOptions:
    given = {"input": source, "output": output, "model": str(model), "sampling": SAMPLING, "decode": DECODE}
    return GenerateOptions(**(given | changes))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_of_a_mixed_file_good_rows_are_answered_and_bad_ones_explained(
    cluster: None, model_folder: Path, tmp_path: Path, name: str
) -> None:
    source, output = tmp_path / name, tmp_path / "out"
    source.write_bytes(gzip.compress(mixed_lines()) if name.endswith("gz") else mixed_lines())
    report = generate(options(source, output, model_folder))
    generator = Generator(load_checkpoint(model_folder), SAMPLING, DECODE, EngineOptions(compiled=False))
    expected = generator.run([json.dumps(row).encode() for row in GOOD])
    assert answered(output) == [asdict(outcome) for outcome in expected]
    errors = errors_in(output)
    assert [error["id"] for error in errors] == [given for given, _ in BAD.values()]
    for error, (raw, (_, reason)) in zip(errors, BAD.items(), strict=True):
        assert reason in error["reason"]
        assert error["row"] == raw.decode(errors="replace")
    assert (report.rows, report.errors) == (150, 5)
    assert report.tokens == sum(row["tokens"] for row in answered(output))
    assert 0 < report.decode_seconds < report.wall_seconds
    assert json.loads((output / "report.json").read_text()) == asdict(report)


def test_parquet_is_answered_by_two_workers_in_order(cluster: None, model_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.parquet", tmp_path / "out"
    conversation = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    rows: list[dict[str, Any]] = [{"id": row["id"], "prompt": row["prompt"], "messages": None} for row in GOOD]
    rows.append({"id": "talk", "prompt": None, "messages": [*conversation, {"role": "user", "content": "three"}]})
    rows.append({"id": "over", "prompt": None, "messages": conversation})
    rows.append({"id": "null", "prompt": None, "messages": None})
    pq.write_table(pa.Table.from_pylist(rows), source)
    report = generate(options(source, output, model_folder, workers=2))
    assert [row["id"] for row in answered(output)] == [row["id"] for row in GOOD] + ["talk"]
    assert answered(output)[-1]["prompt"] == "three"
    assert pq.read_schema(output / "part-00000.parquet") == OUTPUT_SCHEMA
    assert [error["id"] for error in errors_in(output)] == ["over", "null"]
    assert (report.rows, report.errors) == (151, 2)


def test_more_workers_than_cpus_are_refused(cluster: None, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}')
    with pytest.raises(ClusterError, match="3 workers need as many CPUs, the cluster has 2"):
        generate(options(tmp_path / "rows.jsonl", tmp_path / "out", model_folder, workers=3))
    assert not (tmp_path / "out").exists()


def test_what_only_a_worker_finds_is_said_in_its_words_and_leaves_nothing(
    cluster: None, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}')
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    write_card(CARD, broken)
    with pytest.raises(RunError, match=r"has id 5, the tokenizer says 260.*belongs to another checkpoint"):
        generate(options(tmp_path / "rows.jsonl", tmp_path / "out", broken))
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_with_the_arguments_is_said_before_ray_starts(model_folder: Path, tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text('{"prompt": "x"}')
    (tmp_path / "rows.csv").touch()
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "bad.jsonl.gz").write_text("no gzip")
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(mixed_lines())[:-20])
    (tmp_path / "blank.jsonl").write_text("\n\n")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    (broken / "mars.json").write_text("{}")
    cases: list[tuple[GenerateOptions, type[InputError], str]] = [
        (options(tmp_path / "none.jsonl", output, model_folder), DataError, "no file .*none.jsonl"),
        (options(tmp_path, output, model_folder), DataError, "is a folder"),
        (options(tmp_path / "rows.csv", output, model_folder), DataError, "neither JSONL nor parquet"),
        (options(tmp_path / "bad.parquet", output, model_folder), DataError, "bad.parquet cannot be read"),
        (options(tmp_path / "bad.jsonl.gz", output, model_folder), DataError, "bad.jsonl.gz cannot be read"),
        (options(tmp_path / "half.jsonl.gz", output, model_folder), DataError, "half.jsonl.gz cannot be read"),
        (options(tmp_path / "blank.jsonl", output, model_folder), EmptyDataError, "blank.jsonl holds no rows"),
        (options(tmp_path / "empty.parquet", output, model_folder), EmptyDataError, "empty.parquet holds no rows"),
        (options(rows, output, tmp_path / "tiny"), ModelError, "unknown model"),
        (options(rows, output, tmp_path), ModelError, "no config.json"),
        (options(rows, output, broken), ModelError, "not a valid card"),
        (options(rows, tmp_path, model_folder), OutputError, "already in use"),
        (options(rows, output, model_folder, workers=0), ConfigError, "workers is 0"),
    ]
    for given, kind, message in cases:
        with pytest.raises(kind, match=message):
            generate(given)
    assert not output.exists()

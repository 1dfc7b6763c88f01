"""The input of a job through Ray Data: each row once at every run, and the names of folders as columns."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mars_ray.batch.output.report import JobReport
from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.engine.request import SamplingParams
from tests.factories.jobs import generate_options

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def answer(inputs: tuple[str, ...], output: Path, model: Path, **changes: Any) -> JobReport:
    sampling = SamplingParams(max_tokens=3)
    return generate_files(generate_options(Path(), output, model, input=inputs, sampling=sampling, **changes))


def test_a_job_below_its_input_answers_each_row_once_at_every_run(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("d")
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "x"}\n')
    os.link(folder / "a.jsonl", folder / "b.jsonl")
    (folder / "again").symlink_to(".")
    for runs in (1, 2):
        report = answer(("d", "d/a.jsonl", "d/**/*.jsonl"), folder / "out", model_folder, format="jsonl")
        assert (report.rows, report.total, report.errors, report.runs) == (1, 1, 0, runs)
        errors = capsys.readouterr().err
        assert errors.count("found more than once and read once: d/a.jsonl, d/again, d/b.jsonl") == 1
        assert errors.count("left out 1 file below d/out: it is the output of this job") == runs - 1
        assert json.loads((folder / "out" / "report.json").read_text())["notes"] == list(report.notes)
    [shard] = (folder / "out" / "rows").iterdir()
    assert len(shard.read_text().splitlines()) == 1


@pytest.mark.slow
def test_names_of_folders_are_columns_of_templates_and_of_the_output(model_folder: Path, tmp_path: Path) -> None:
    for lang in ("en", "de"):
        (tmp_path / "in" / f"lang={lang}" / "seed=x").mkdir(parents=True)
        pq.write_table(pa.table({"prompt": ["hi"]}), tmp_path / "in" / f"lang={lang}" / "seed=x" / "p.parquet")
    (tmp_path / "in" / "lang=__HIVE_DEFAULT_PARTITION__").mkdir()
    (tmp_path / "in" / "lang=__HIVE_DEFAULT_PARTITION__" / "p.jsonl").write_text('{"prompt": "hi"}')
    template = "{% if lang is none %}-{% else %}{{ lang }}{% endif %} {{ prompt }}"
    names = (f"{tmp_path}/in", f"{tmp_path}/in/lang=en/seed=x/p.parquet")
    report = answer(names, tmp_path / "out", model_folder, template=template)
    rows = pq.read_table(tmp_path / "out" / "rows").to_pylist()
    assert sorted((row["prompt"], row["lang"] or "") for row in rows) == [
        ("- hi", ""),
        ("de hi", "de"),
        ("en hi", "en"),
    ]
    note = "folders named seed=... add no column, because these names are reserved for the options of a row"
    assert note in report.notes
    assert answer((names[1],), tmp_path / "out", model_folder, template=template).rows == 3

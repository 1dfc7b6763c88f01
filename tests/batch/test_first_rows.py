"""An input of which nothing can be asked is refused before anything is started, with the reason."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mars_ray.batch.run import job_plan
from mars_ray.batch.run.job_plan import plan_job
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import ConfigError, DataError, InputError
from tests.factories.jobs import generate_options

ROW = {"id": "a", "question": "What is 1 + 1?", "n_of_it": 3}


def plan(tmp_path: Path, model: Path, content: bytes | str, name: str = "rows.jsonl", **changes: Any) -> None:
    source = tmp_path / name
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    plan_job(generate_options(source, tmp_path / "out", model, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {},
            r"60 x it has neither 'prompt' nor 'messages'.*columns are id, question, n_of_it\..*--prompt-column",
        ),
        ({"prompt_column": "questoin"}, r"60 x it has no 'questoin'.*Did you mean 'question'\?"),
        ({"template": "{{ qestion }}"}, r"60 x the template cannot be filled: 'qestion' is.*Did you mean 'question'\?"),
        ({"prompt_column": "n_of_it"}, r"'n_of_it' must be text, not int 3"),
    ],
)
def test_rows_that_cannot_be_asked_are_refused_with_reason_and_columns(
    tmp_path: Path, model_folder: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=f"none of the first 60 rows can be answered.*{reason}"):
        plan(tmp_path, model_folder, f"{json.dumps(ROW)}\n" * 60, **changes)


BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.jsonl", b"", "holds no rows"),
        ("rows.jsonl", b"id,prompt\n1,what\n", "it is not JSON"),
        ("rows.jsonl", bytes(range(256)) * 20, "it is not JSON"),
        ("rows.jsonl", gzip.compress(b'{"prompt": "x"}', mtime=0), "it is not JSON"),
        ("rows.jsonl.gz", b'{"prompt": "x"}', "cannot be read"),
        ("rows.jsonl", b"[1]\n[2]\n", "it is not a JSON object"),
        ("rows.jsonl", b'{"prompt": {"text": "x"}}', r"the only row cannot.*'prompt' must be text, not dict"),
        ("rows.jsonl", b'{"prompt": "' + b"x" * 1000 + b'"}', "its prompt has 1003 tokens; .* may have 128 at most"),
        ("rows.jsonl", json.dumps(BATCH).encode(), "its 'url' is '/v1/embeddings', must be /v1/chat/completions"),
        ("rows.jsonl", b'{"prompt": ""}', "its prompt is empty"),
    ],
)
def test_files_of_other_kinds_are_refused(
    tmp_path: Path, model_folder: Path, name: str, content: bytes, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        plan(tmp_path, model_folder, content, name)


def test_parquet_without_the_column_is_refused(tmp_path: Path, model_folder: Path) -> None:
    pq.write_table(pa.table({"promt": ["x", "y"]}), tmp_path / "made")
    with pytest.raises(DataError, match=r"2 x it has neither.*columns are promt\. Did you mean 'promt'\?"):
        plan(tmp_path, model_folder, (tmp_path / "made").read_bytes(), "rows.parquet")


def test_one_row_among_the_first_hundred_is_enough(tmp_path: Path, model_folder: Path) -> None:
    plan(tmp_path, model_folder, "{}\n" * 99 + '{"prompt": "x"}')
    with pytest.raises(DataError, match="none of the first 100 rows"):
        plan(tmp_path, model_folder, "{}\n" * 100 + '{"prompt": "x"}')


def test_a_row_of_which_only_scores_are_wanted_may_fill_the_context(tmp_path: Path, model_folder: Path) -> None:
    row = json.dumps({"prompt": "x" * 125})  # 128 tokens with those of the chat template
    plan(tmp_path, model_folder, row, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
    with pytest.raises(DataError, match="its prompt has 128 tokens"):
        plan(tmp_path, model_folder, row)


@pytest.mark.parametrize("adapter", ["smollm2", "./nowhere"])
def test_an_adapter_that_is_missing_or_of_another_model_is_refused(
    tmp_path: Path, model_folder: Path, adapter: str
) -> None:
    with pytest.raises(InputError, match=r"is an adapter for|unknown adapter"):
        plan(tmp_path, model_folder, '{"prompt": "x"}', adapter=adapter)


def test_a_template_that_names_a_column_in_brackets_gets_a_hint(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(DataError, match=r"Did you mean 'question'\?"):
        plan(tmp_path, model_folder, json.dumps(ROW), template="{{ row['qestion'] }}")


def test_a_huge_first_row_is_left_to_a_worker(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_plan, "ROW_BYTES", 500)
    plan(tmp_path, model_folder, json.dumps({"prompt": "x" * 500}) + "\n{}")
    with pytest.raises(DataError, match="its prompt has 483 tokens"):
        plan(tmp_path, model_folder, json.dumps({"prompt": "x" * 480}) + "\n{}")


def test_a_job_with_a_batch_file_is_one_of_its_weights_not_of_the_name_of_their_folder(
    tmp_path: Path, model_folder: Path
) -> None:
    other = shutil.copytree(model_folder, tmp_path / "other" / model_folder.name)
    (other / "generation_config.json").write_text('{"temperature": 0.5}')
    source = tmp_path / "batch.jsonl"
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    source.write_text(json.dumps(BATCH | {"url": "/v1/chat/completions", "body": body}))
    models = {
        plan_job(generate_options(source, tmp_path / "out", folder)).settings["model"]
        for folder in (model_folder, other)
    }
    assert len(models) == 2


def test_sampling_parameters_are_refused_with_a_batch_file_even_if_they_are_the_defaults(
    tmp_path: Path, model_folder: Path
) -> None:
    source = tmp_path / "batch.jsonl"
    source.write_text(json.dumps(BATCH))
    with pytest.raises(ConfigError, match="sampling parameters such as temperature and max_tokens: the input is an"):
        plan_job(generate_options(source, tmp_path / "out", model_folder, sampling=SamplingParams()))

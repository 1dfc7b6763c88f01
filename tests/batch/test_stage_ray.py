"""Our stage in pipelines of somebody's own: what Ray Data reads, maps and writes around it is theirs."""

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.data
from ray.exceptions import RayTaskError

from mars_ray.engine.request import SamplingParams
from mars_ray.errors import ClusterError, ConfigError, ModelError
from mars_ray.ray_data import Processor, ProcessorConfig, build_processor

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ENGINE = "mars-ray-engine"


def stage(model: Path | str, **changes: Any) -> Processor:
    given: dict[str, Any] = {"sampling": SamplingParams(max_tokens=4), "batch_size": 8}
    functions = {name: changes.pop(name, None) for name in ("preprocess", "postprocess")}
    return build_processor(ProcessorConfig(model=str(model), **(given | changes)), **functions)


def engines_below(pid: int) -> list[psutil.Process]:
    """The engine processes of the cluster whose processes stand below one: no other's, which may run here too."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if each.name() == ENGINE:
                found.append(each)
    return found


def kill_an_engine(row: dict[str, Any]) -> dict[str, Any]:
    """A map of somebody's, at whose 20th row an engine dies."""
    if row["number"] == 20:
        raylet = os.getppid()
        for each in engines_below(raylet):
            each.kill()
    return row


@pytest.mark.slow
def test_a_pipeline_of_anothers_with_two_stages_a_failing_row_and_a_killed_engine(
    model_folder: Path, tmp_path: Path
) -> None:
    rows = [f'{number},"is {number}, or not?"' for number in range(40)] + [f"40,{'x' * 200}"]
    (tmp_path / "questions.csv").write_text("number,question\n" + "\n".join(rows))
    first = stage(
        model_folder,
        should_continue_on_error=True,
        preprocess=lambda row: {"messages": [{"role": "user", "content": row["asked"]}], "threshold": 0.9},
        postprocess=lambda row: {"number": row["number"], "kind": row["kind"], "said": row["text"]},
    )
    second = stage(
        model_folder,
        should_continue_on_error=True,
        preprocess=lambda row: {"prompt": f"{row['number']}", "sampling": {"max_tokens": 40, "schema": SCHEMA}},
    )
    asked = ray.data.read_csv(str(tmp_path / "questions.csv")).map(
        lambda row: {"number": row["number"], "kind": row["number"] % 3, "asked": row["question"][:150]}
    )
    first(asked).map(kill_an_engine).write_parquet(str(tmp_path / "said"))
    second(ray.data.read_parquet(str(tmp_path / "said"))).write_parquet(str(tmp_path / "out"))
    found = {row["number"]: row for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert sorted(found) == list(range(41))
    assert all(row["kind"] == row["number"] % 3 for row in found.values())
    assert [row["number"] for row in found.values() if row["said"] is None] == [40]
    for row in found.values():
        assert row["error"] is None and set(json.loads(row["text"])) == {"city"}


class OnGpu:
    """A neighbour with an actor: it keeps a CPU and a GPU for as long as the pipeline runs."""

    def __call__(self, table: pa.Table) -> pa.Table:
        return table


def on_gpu(table: pa.Table) -> pa.Table:
    """A neighbour with tasks."""
    assert ray.get_gpu_ids()
    return table


@pytest.mark.slow
def test_neighbours_that_ask_for_gpus_and_an_engine_that_does_leave_nobody_waiting(model_folder: Path) -> None:
    given = ray.data.range(24, override_num_blocks=4).map(lambda row: {"prompt": f"say {row['id']}"})
    held = given.map_batches(OnGpu, num_gpus=1, concurrency=1, batch_format="pyarrow", batch_size=8)
    answered = stage(model_folder, gpus=0.5)(held)
    found = answered.map_batches(on_gpu, num_gpus=0.5, batch_format="pyarrow", batch_size=8).take_all()
    assert len(found) == 24


@pytest.mark.slow
def test_stages_in_a_row_share_engines_and_keep_the_columns_as_they_were(model_folder: Path) -> None:
    columns = {"id": pa.array(range(30), pa.int32()), "tags": pa.array([["a"], None] * 15), "text": ["theirs"] * 30}
    given = ray.data.from_arrow(pa.table(columns))
    first = stage(model_folder, preprocess=lambda row: {"prompt": f"say {row['id']}", "threshold": 0.5})
    count = stage(
        model_folder, preprocess=lambda row: {"prompt": "again", "sampling": {"seed": row["id"], "temperature": 1}}
    )
    alive = []
    tables = []
    for table in count(first(given)).iter_batches(batch_format="pyarrow", batch_size=None):
        tables.append(table)
        alive.append(len(engines_below(os.getpid())))
    found = pa.concat_tables(tables).sort_by("id")
    assert set(alive) == {1}
    assert found["id"].combine_chunks() == columns["id"]
    assert found["tags"].to_pylist() == columns["tags"].to_pylist()
    assert "theirs" not in found["text"].to_pylist()
    assert set(found["finish_reason"].to_pylist()) <= {"stop", "length"}


@pytest.mark.slow
def test_a_row_may_have_several_answers_and_says_its_own_sampling_mode_and_threshold(model_folder: Path) -> None:
    rows = [
        {"prompt": "one", "sampling": {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 3}, "mode": "ar"},
        {"prompt": "two", "sampling": {"regex": "[ab]{3}", "max_tokens": 9}, "threshold": 0.5},
    ]
    found = stage(model_folder)(ray.data.from_items(rows)).take_all()
    assert Counter(row["prompt"] for row in found) == {"one": 3, "two": 1}
    assert sorted(row["sample"] for row in found) == [0, 0, 1, 2]
    [two] = [row for row in found if row["prompt"] == "two"]
    assert two["text"].strip("ab") == "" and len(two["text"]) == 3
    assert all(row["tokens"] == row["forwards"] == 3 for row in found if row["prompt"] == "one")


def test_without_leave_to_go_on_a_row_that_has_no_answer_ends_the_job_with_its_reason(model_folder: Path) -> None:
    rows = [{"prompt": "good"}, {"prompt": "bad", "sampling": {"temprature": 1}}]
    with pytest.raises(
        RayTaskError, match="a row has no answer: sampling has the unknown parameter 'temprature'; the known ones are"
    ):
        stage(model_folder)(ray.data.from_items(rows)).take_all()


@pytest.mark.slow
def test_a_deadline_sets_the_threshold_of_a_stage() -> None:
    rows = [{"prompt": f"say {number}"} for number in range(40)]
    given = stage("bundled", deadline_s=3600, rows=40)(ray.data.from_items(rows))
    assert {row["threshold"] for row in given.take_all()} == {1.0}


def test_what_cannot_be_is_said_before_anything_runs(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        stage(tmp_path)
    with pytest.raises(ConfigError, match="deadline_s needs rows"):
        stage(model_folder, deadline_s=60)
    with pytest.raises(ClusterError, match="do not fit into the cluster"):
        stage(model_folder, concurrency=400)(ray.data.range(1))

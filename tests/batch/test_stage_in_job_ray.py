"""A pipeline of somebody's as a Ray job: its code comes to the cluster by `runtime_env`."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from mars_ray.serve.deploy.environment import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SECONDS = 240
QUESTIONS = """
def asked(row):
    return {"prompt": f"say {row['id']}", "sampling": {"max_tokens": 4}}
"""
PIPELINE = """
import sys

import ray
from questions import asked

from mars_ray.ray_data import ProcessorConfig, build_processor

ray.init()
model, output = sys.argv[1:]
stage = build_processor(ProcessorConfig(model=model), preprocess=asked)
stage(ray.data.range(20)).write_parquet(output)
"""


@pytest.fixture
def jobs() -> Iterator[JobSubmissionClient]:
    """A cluster that takes jobs."""
    context = ray.init(
        address="local", num_cpus=2, include_dashboard=True, dashboard_port=next(free_ports()), log_to_driver=False
    )
    yield JobSubmissionClient(f"http://{context.dashboard_url}")
    ray.shutdown()


def test_a_stage_runs_in_a_job_whose_code_comes_with_it(
    jobs: JobSubmissionClient, model_folder: Path, tmp_path: Path
) -> None:
    code, output = tmp_path / "code", tmp_path / "out"
    code.mkdir()
    (code / "questions.py").write_text(QUESTIONS)
    (code / "pipeline.py").write_text(PIPELINE)
    job = jobs.submit_job(
        entrypoint=f"{sys.executable} pipeline.py {model_folder} {output}", runtime_env={"working_dir": str(code)}
    )
    ends_s = time.monotonic() + SECONDS
    while not (status := jobs.get_job_status(job)).is_terminal():
        assert time.monotonic() < ends_s, jobs.get_job_logs(job)
        threading.Event().wait(1.0)
    assert status == JobStatus.SUCCEEDED, jobs.get_job_logs(job)
    found = pq.read_table(output).to_pylist()
    assert sorted(row["id"] for row in found) == list(range(20))
    assert all(row["tokens"] >= 1 and row["error"] is None for row in found)

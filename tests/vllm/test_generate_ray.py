"""`mars-ray generate --engine vllm` as a user runs it, killed in the middle: the same command goes on."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

from tests.vllm.cluster_engines import ENVIRONMENT, VLLM_ARGS  # noqa: E402, I001

import psutil  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from mars_ray.batch.output.ledger import LEDGER, rows_done  # noqa: E402
from mars_ray.data.tasks.split import mixture  # noqa: E402

COMMAND = Path(sys.executable).with_name("mars-ray")
ROWS = 500
POLL_SECONDS = 0.2
SECONDS = 900


def start(source: Path, output: Path) -> "subprocess.Popen[str]":
    arguments = [f"--vllm-arg={name}={json.dumps(value)}" for name, value in VLLM_ARGS.items()]
    settings = ["--engine", "vllm", "--dtype", "float32", "--mode", "exact", "--max-tokens", "24", "--workers", "1"]
    return subprocess.Popen(
        [str(COMMAND), "generate", "--input", str(source), "--output", str(output), *settings, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | ENVIRONMENT,
    )


def end(process: "subprocess.Popen[str]") -> None:
    """Kill the job and everything it started."""
    with process:
        process.kill()
        family = [other for other in psutil.process_iter() if session_of(other) == process.pid]
        for other in family:
            other.kill()
        psutil.wait_procs(family, timeout=SECONDS)


def session_of(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1


def test_every_row_of_a_killed_job_is_there_once_after_the_same_command(tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out"
    examples = islice(mixture("train", seed=0), ROWS)
    lines = (json.dumps({"id": f"row-{n}", "prompt": example.prompt}) for n, example in enumerate(examples))
    source.write_text("\n".join(lines) + "\n")

    killed = start(source, output)
    try:
        ends_s = time.monotonic() + SECONDS
        while rows_done(output / LEDGER) < ROWS // 2:
            assert killed.poll() is None, killed.communicate()[0]
            assert time.monotonic() < ends_s, f"only {rows_done(output / LEDGER)} rows are done"
            time.sleep(POLL_SECONDS)
    finally:
        end(killed)
    assert ROWS // 2 <= rows_done(output / LEDGER) < ROWS

    resumed = start(source, output)
    try:
        said, _ = resumed.communicate(timeout=SECONDS)
    finally:
        end(resumed)
    assert resumed.returncode == 0, said
    rows = pq.read_table(output / "rows")
    assert Counter(rows["id"].to_pylist()) == Counter({f"row-{n}": 1 for n in range(ROWS)})
    assert sum(rows["forwards"].to_pylist()) < sum(rows["tokens"].to_pylist()) / 2
    report = json.loads((output / "report.json").read_text())
    assert (report["rows"], report["runs"], report["status"]) == (ROWS, 2, "complete")

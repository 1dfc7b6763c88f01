"""A job as a user runs it, killed and interrupted: the same command goes on, and every row is there once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from mars_ray.batch.output.ledger import LEDGER, rows_done

pytestmark = [pytest.mark.ray, pytest.mark.slow]
COMMAND = Path(sys.executable).with_name("mars-ray")
ROWS = 6000
POLL_SECONDS = 0.1
"""Whoever looks all the time takes a core from the job."""
SECONDS = 300


def start(source: Path, output: Path, model: Path) -> "subprocess.Popen[str]":
    settings = ["--model", str(model), "--max-tokens", "60", "--threshold", "1", "--workers", "1"]
    return subprocess.Popen(
        [str(COMMAND), "generate", "--input", str(source), "--output", str(output), *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until(done: int, output: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until so many rows are done."""
    ends_s = time.monotonic() + SECONDS
    while rows_done(output / LEDGER) < done:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < ends_s, f"only {rows_done(output / LEDGER)} rows are done"
        time.sleep(POLL_SECONDS)


def end(process: "subprocess.Popen[str]") -> None:
    """Take down what is left of a killed run, so that the machine is free."""
    with process:
        family = [each for each in psutil.process_iter() if _session(each) == process.pid]
        for each in family:
            each.kill()
        psutil.wait_procs(family, timeout=SECONDS)


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1


def rows_in(source: Path, rows: int = ROWS) -> None:
    source.write_text("".join(json.dumps({"id": f"row-{n}", "prompt": f"say {n}"}) + "\n" for n in range(rows)))


def check(output: Path, last: "subprocess.Popen[str]", runs: int, rows: int = ROWS) -> None:
    """Let the last run end, and find every row once."""
    said, _ = last.communicate(timeout=SECONDS)
    assert last.returncode == 0, said
    ids = Counter(pq.read_table(output / "rows")["id"].to_pylist())
    assert ids == Counter({f"row-{n}": 1 for n in range(rows)})
    report = json.loads((output / "report.json").read_text())
    assert (report["rows"], report["runs"], report["status"]) == (rows, runs, "complete")


def test_every_row_is_there_once_after_a_kill_ctrl_c_and_sigterm(model_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out"
    rows_in(source)

    killed = start(source, output, model_folder)
    until(100, output, killed)
    killed.kill()
    end(killed)

    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        stopped = start(source, output, model_folder)
        until(rows_done(output / LEDGER) + 1, output, stopped)
        stopped.send_signal(number)
        said, _ = stopped.communicate(timeout=SECONDS)
        assert stopped.returncode == code, said
        assert said.splitlines()[-1].endswith("Run the same command to continue.")
        ours = ("read the input: ", "generate: ", "mars-ray: ")
        assert [line for line in said.splitlines() if not line.startswith(ours) and "network_util" not in line] == []
        readable = pq.read_table(output / "rows").num_rows
        assert readable == rows_done(output / LEDGER) < ROWS

    check(output, start(source, output, model_folder), runs=4)


def test_a_decoder_that_is_killed_is_replaced(model_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out"
    rows_in(source)
    job = start(source, output, model_folder)
    until(1, output, job)
    next(each for each in psutil.Process(job.pid).children(recursive=True) if "Decoder" in each.name()).kill()
    check(output, job, runs=1)


def test_an_engine_that_is_stopped_is_replaced(model_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out"
    rows_in(source, 1200)
    job = start(source, output, model_folder)
    until(200, output, job)  # by now its step times are known
    next(
        each for each in psutil.Process(job.pid).children(recursive=True) if each.name() == "mars-ray-engine"
    ).suspend()
    check(output, job, runs=1, rows=1200)

"""Measure the memory of driver, reader and workers of a generate job as its input grows.

    python -m benchmarks.batch_memory --json benchmarks/results/DATE-batch-memory.json

Workers echo their rows instead of decoding them. Reading, ids, Ray Data, ledger and shards are those of every job.
Memory is the peak of a process's private memory (RssAnon in /proc). Pages of Ray's object store are not counted because
all processes share them, and Ray limits them.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.dataset
from rich.console import Console

from benchmarks.killed_jobs import job_processes
from mars_ray.batch.ray import decoder as ray_decoder
from mars_ray.batch.ray.decoder import Decoder
from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.rows.row_tables import RowResult, as_json, to_table
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.cli.shared import write_json
from mars_ray.errors import RunError
from mars_ray.measure import machine
from mars_ray.program import run_program

POLL_S = 0.5


class Echo(Decoder):
    """A decoder that returns the text of each row."""

    async def answer(self, rows: pa.Table, row_format: bytes) -> pa.Table:  # noqa: ARG002
        """Return the results of a block of rows."""
        return to_table(
            [
                RowResult(
                    key=row["key"],
                    records=(as_json({"id": row["id"], "sample": 0, "text": row["raw"].decode(), "tokens": 8}),),
                    tokens=(8,),
                    forwards=(2,),
                    threshold=0.95,
                    worker="echo",
                )
                for row in rows.to_pylist()
            ]
        )


PARTS = {"reader": "ray::Read", "worker": f"ray::{Echo.__name__}"}
"""Beginnings of the names of processes; Ray names the process of an actor after its class."""


def main() -> None:
    """Run a job of each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        ray_decoder.Decoder = Echo  # type: ignore[misc]
        generate_files(GenerateOptions(input=(str(arguments.run / "rows.jsonl"),), output=arguments.run / "out"))
        return
    report = {
        "command": f"python -m benchmarks.batch_memory --rows {' '.join(map(str, arguments.rows))}",
        "machine": machine(),
        "rows": {str(rows): measure(rows) for rows in arguments.rows},
    }
    Console().print_json(data=report)
    write_json(arguments.json, report)


def measure(rows: int) -> dict[str, Any]:
    """Return the peak memory of each process in MiB."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "rows.jsonl").open("w") as file:
            for number in range(rows):
                file.write(json.dumps({"prompt": f"What is {number} and one?", "tag": number % 7}) + "\n")
        started_s = time.monotonic()
        driver = subprocess.Popen([sys.executable, "-m", "benchmarks.batch_memory", "--run", name])
        peaks_mib = dict.fromkeys(["driver", *PARTS], 0.0)
        while driver.poll() is None:
            time.sleep(POLL_S)
            peaks_mib["driver"] = max(peaks_mib["driver"], _mib(driver.pid))
            for part, title in PARTS.items():
                parts_mib = [_mib(process.pid) for process in job_processes(driver.pid, title)]
                peaks_mib[part] = max([peaks_mib[part], *parts_mib])
        if unseen := [part for part, peak_mib in peaks_mib.items() if not peak_mib]:
            raise RunError(f"no memory of {', '.join(unseen)} was seen; the job ended with {driver.returncode}.")
        kept_rows = pyarrow.dataset.dataset(folder / "out" / "rows").count_rows()
        return {
            "mib": peaks_mib,
            "seconds": time.monotonic() - started_s,
            "kept": kept_rows,
            "exit_code": driver.returncode,
        }


def _mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # the process has ended
        return 0.0
    # An ended process may still have a status.
    [kib] = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE) or [0]
    return int(kib) / 1024


if __name__ == "__main__":
    run_program("benchmarks.batch_memory", main)

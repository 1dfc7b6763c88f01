"""Kill a generate job repeatedly; check that every row is written once, and count repeated tokens.

    python -m benchmarks.batch_kill --rows 100000 --kills 10 --json benchmarks/results/DATE-batch-kill.json

The bundled model answers prompts of its own tasks. At random moments, spread over the job, `kill -9` ends the driver,
an actor of Ray or an engine, in turn. When the driver was killed, the same job is started again. Every token that any
engine returns is counted in a file, so the repeated tokens are measured.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.dataset
from rich.console import Console

from benchmarks.killed_jobs import job_processes, kill_moments, row_faults
from mars_ray.batch.output.ledger import LEDGER, rows_done
from mars_ray.batch.ray import decoder as ray_decoder
from mars_ray.batch.ray.decoder import Decoder
from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions, WorkerOptions
from mars_ray.cli.shared import write_json
from mars_ray.data.tasks.split import mixture
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.chunk_streams import ChunkStreams
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.measure import machine
from mars_ray.program import run_program

TARGETS = ("driver", "ray::CountingDecoder", "mars-ray-engine")
POLL_S = 0.2


class CountingDecoder(Decoder):
    """A worker that counts the tokens of its engine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        deliver = ChunkStreams.deliver
        counts = Path(os.environ["MARS_RAY_COUNTED"])

        def count(streams: ChunkStreams, chunks: Sequence[Chunk]) -> list[str]:
            with (counts / f"{os.getpid()}.txt").open("a") as file:
                file.write(f"{sum(len(chunk.tokens) for chunk in chunks)}\n")
            return deliver(streams, chunks)

        # Patch the class of the streams, because a class that Ray pickles from this file has its own globals.
        ChunkStreams.deliver = count  # type: ignore[method-assign, assignment]


@dataclass
class Killed:
    """Kills of one run."""

    rows: list[int] = field(default_factory=list)
    """Rows done at each kill."""
    targets: Counter[str] = field(default_factory=Counter)


def main() -> None:
    """Run the job until it is complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run, arguments.workers)
        return
    with TemporaryDirectory() as folder:
        report = measure(Path(folder), arguments.rows, arguments.kills, arguments.workers, arguments.seed)
    Console().print_json(data=report)
    write_json(arguments.json, report)


def run(folder: Path, workers: int) -> None:
    """Start the job once, as the command line does."""
    ray_decoder.Decoder = CountingDecoder  # type: ignore[misc, assignment]
    options = GenerateOptions(
        input=(str(folder / "rows.jsonl"),),
        output=folder / "out",
        sampling=SamplingParams(max_tokens=64),
        decode=DecodeParams(threshold=0.95),
        workers=WorkerOptions(count=workers),
    )
    generate_files(options)


def measure(folder: Path, rows: int, kills: int, workers: int, seed: int) -> dict[str, Any]:
    """Return the results of the job."""
    source = folder / "rows.jsonl"
    counts = folder / "counted"
    counts.mkdir()
    with source.open("w") as file:
        for number, example in enumerate(islice(mixture("train", seed), rows)):
            file.write(json.dumps({"id": f"row-{number}", "prompt": example.prompt}) + "\n")
    killed = Killed()
    started_s = time.monotonic()
    moments = kill_moments(rows, kills, seed)
    starts = 0
    while True:
        starts += 1
        command = [sys.executable, "-m", "benchmarks.batch_kill", "--run", str(folder), "--workers", str(workers)]
        driver = subprocess.Popen(command, env=os.environ | {"MARS_RAY_COUNTED": str(counts)}, start_new_session=True)
        died = _watch(driver, folder / "out", moments, killed)
        if not died:
            break
    seconds = time.monotonic() - started_s
    table = pyarrow.dataset.dataset(folder / "out" / "rows").to_table(columns=["id", "tokens"])
    kept_tokens = sum(table["tokens"].to_pylist())
    made_tokens = sum(int(line) for path in counts.iterdir() for line in path.read_text().split())
    return {
        "command": "python -m benchmarks.batch_kill",
        "machine": machine(),
        "rows": rows,
        "workers": workers,
        "seed": seed,
        "kills": {"at_rows": killed.rows, "of": dict(killed.targets), "starts_of_the_driver": starts},
        "exit_code": driver.returncode,
        "seconds": seconds,
        **row_faults(table["id"].to_pylist(), rows),
        "tokens_kept": kept_tokens,
        "tokens_made": made_tokens,
        "rework": made_tokens / kept_tokens - 1,
    }


def _watch(driver: "subprocess.Popen[bytes]", output: Path, moments: list[float], killed: Killed) -> bool:
    """Kill processes when due; return True if the driver was killed, False if it ended by itself."""
    while driver.poll() is None:
        time.sleep(POLL_S)
        done_rows = rows_done(output / LEDGER)
        if not moments or done_rows < moments[0] or done_rows == (killed.rows or [-1])[-1]:
            continue
        target = TARGETS[len(killed.rows) % len(TARGETS)]
        victims = [driver] if target == "driver" else job_processes(driver.pid, target)
        if not victims:
            continue
        moments.pop(0)
        killed.rows.append(done_rows)
        killed.targets[target] += 1
        victims[0].kill()
        if target == "driver":
            driver.wait()
            return True
    return False


if __name__ == "__main__":
    run_program("benchmarks.batch_kill", main)

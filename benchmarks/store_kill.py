"""Kill a generate job that reads and writes an object store, repeatedly, with a new disk each time.

    python -m benchmarks.store_kill --rows 100000 --kills 10 --json benchmarks/results/DATE-store-kill.json
    python -m benchmarks.store_kill --compare --rows 20000 --max-tokens 64   # on a disk and in a store, in turns

Every row must be in the output once. The store is `benchmarks/s3_server.py` in its own process, which answers a share
of all requests with SlowDown. At random moments, spread over the job, `kill -9` ends the driver, an actor of Ray, the
store or an engine, in turn. A killed driver loses its disk: its temporary folders are removed before the next driver
starts. At the first kill of an actor a second driver is started next to the first. Prompts and answers have a few
tokens, so that most of the work is the job's and little is the model's; `--compare` uses real prompts.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from io import BytesIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks.killed_jobs import job_processes, kill_moments, row_faults
from mars_ray.batch.output.ledger import rows_done
from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions, WorkerOptions
from mars_ray.cli.shared import write_json
from mars_ray.data.tasks.split import mixture
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.measure import machine
from mars_ray.program import run_program
from mars_ray.storage.location import locate, locate_url

SERVER = Path(__file__).with_name("s3_server.py")
TARGETS = ("driver", "ray::Decoder", "store", "mars-ray-engine")
POLL_S = 0.5
BUCKET = "s3://measured"
STARTS_S = 120.0
STARTS_IN_VAIN = 5
STUCK_S = 300.0
"""Seconds without progress after which a driver is killed and started again."""
SAY_S = 30.0
LOG_FILE = "said.txt"


class Store:
    """A store that keeps its objects across restarts."""

    def __init__(self, folder: Path, port: int, slow_down: float) -> None:
        self._command = [sys.executable, str(SERVER), str(port), "--slow-down", str(slow_down)]
        self._command += ["--recording", str(folder / "writes")]
        os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        self.process = self._started()

    def kill(self) -> None:
        """Kill and restart the store."""
        self.process.kill()
        self.process.wait()
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    """Run the job until it is complete, or compare a disk with a store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--slow-down", type=float, default=0.02)
    parser.add_argument("--port", type=int, default=9123)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        source, output = arguments.run
        run(source, output, arguments.max_tokens)
        return
    with TemporaryDirectory() as folder:
        store = Store(Path(folder), arguments.port, 0.0 if arguments.compare else arguments.slow_down)
        try:
            measured = (
                compare(Path(folder), arguments) if arguments.compare else measure(Path(folder), store, arguments)
            )
        finally:
            store.process.kill()
    words = {name: value for name, value in vars(arguments).items() if name not in ("json", "run")}
    report = {"command": "python -m benchmarks.store_kill", "given": words, "machine": machine()} | measured
    Console().print_json(data=report)
    write_json(arguments.json, report)


def run(source: str, output: str, max_tokens: int) -> None:
    """Start the job once, as the command line does, and print tokens per second."""
    options = GenerateOptions(
        input=(source,),
        output=locate(output),
        sampling=SamplingParams(max_tokens=max_tokens),
        decode=DecodeParams(threshold=0.95),
        workers=WorkerOptions(count=2),
    )
    report = generate_files(options)
    print(json.dumps({"rows_per_s": report.rows / report.seconds, "tokens_per_s": report.tokens_per_s}))


def measure(folder: Path, store: Store, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results of the job."""
    _write_rows(f"{BUCKET}/rows.jsonl", arguments)
    began_s = time.monotonic()
    moments = kill_moments(arguments.rows, arguments.kills, arguments.seed)
    killed: list[tuple[int, str]] = []
    second_driver: dict[str, Any] | None = None
    starts = 0
    in_vain = 0
    while True:
        starts += 1
        disk = folder / f"disk-{starts}"
        disk.mkdir()
        driver = _driver(arguments, disk, f"{BUCKET}/out")
        kills_before = len(killed)
        watch = _Watch(disk)
        while driver.poll() is None:
            time.sleep(POLL_S)
            watch.look()
            if watch.stuck:
                driver.kill()
            if not moments or watch.done < moments[0]:
                continue
            target = TARGETS[len(killed) % len(TARGETS)]
            victims = job_processes(driver.pid, target)
            if not victims and target not in ("driver", "store"):
                continue
            moments.pop(0)
            killed.append((watch.done, target))
            _say(f"{watch.done:,} rows: kill {target}")
            if target == "store":
                store.kill()
            elif target == "driver":
                driver.kill()
            else:
                victims[0].kill()
                second_driver = second_driver or _second_driver(folder, arguments)
        _end(driver)
        last_line = _last_log_line(disk)
        shutil.rmtree(disk)
        _say(f"start {starts} ended with {driver.returncode} after {watch.done:,} rows: {last_line}")
        if driver.returncode == 0:
            break
        # A start in which Ray failed finishes no row; run the same command again.
        in_vain = 0 if len(killed) > kills_before or watch.done > watch.done_before else in_vain + 1
        if in_vain == STARTS_IN_VAIN:
            raise RuntimeError(f"{in_vain} starts in a row did nothing; the last line of the last one: {last_line}")
    return {
        "rows": arguments.rows,
        "kills": {
            "at_rows": [rows for rows, _ in killed],
            "of": dict(Counter(target for _, target in killed)),
            "starts_of_the_driver": starts,
        },
        "second_driver": second_driver,
        "exit_code": driver.returncode,
        "seconds": time.monotonic() - began_s,
        **row_faults(_ids(f"{BUCKET}/out"), arguments.rows),
    }


class _Watch:
    """Progress of a driver, read from the ledger on its disk."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._news_s = time.monotonic()
        self._said_s = time.monotonic()
        self.done_before = self.done = 0

    def look(self) -> None:
        """Read the ledger again."""
        done_rows = sum(map(rows_done, self._disk.glob("*/ledger.sqlite")))
        now_s = time.monotonic()
        if done_rows != self.done:
            self.done_before = self.done_before or done_rows
            self.done = done_rows
            self._news_s = now_s
        if now_s - self._said_s > SAY_S:
            self._said_s = now_s
            _say(f"{self.done:,} rows")

    @property
    def stuck(self) -> bool:
        """True if no row was finished for `STUCK_S` seconds."""
        return time.monotonic() - self._news_s > STUCK_S


def _say(line: str) -> None:
    print(f"{time.strftime('%X')} {line}", file=sys.stderr, flush=True)


def compare(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the speed of the same job on a disk and in a store, in turns."""
    rates: dict[str, list[float]] = {"disk": [], "store": []}
    _write_rows(f"{BUCKET}/rows.jsonl", arguments)
    _write_rows(str(folder / "rows.jsonl"), arguments)
    for turn in range(arguments.turns):
        for kind, root in (("disk", str(folder)), ("store", BUCKET)):
            disk = folder / f"temporary-{kind}-{turn}"
            disk.mkdir()
            driver = _driver(arguments, disk, f"{root}/out-{turn}", source=f"{root}/rows.jsonl", stdout=subprocess.PIPE)
            output, _ = driver.communicate()
            rates[kind].append(json.loads(output)["rows_per_s"])
    return {"rows_per_s": rates, "store_over_disk": sum(rates["store"]) / sum(rates["disk"])}


def _write_rows(location: str, arguments: argparse.Namespace) -> None:
    if location.startswith(BUCKET):
        bucket = locate_url(BUCKET)
        ends_s = time.monotonic() + STARTS_S
        while not bucket.fs.exists("measured"):
            try:
                bucket.fs.mkdir("measured")
            except Exception:
                if time.monotonic() > ends_s:
                    raise
    if arguments.compare:
        prompts = [example.prompt for example in islice(mixture("train", arguments.seed), arguments.rows)]
    else:
        prompts = [f"Say {number}" for number in range(arguments.rows)]
    lines = [json.dumps({"id": f"row-{number}", "prompt": prompt}) for number, prompt in enumerate(prompts)]
    locate(location).write_text("\n".join(lines))


def _driver(arguments: argparse.Namespace, disk: Path, output: str, **more: Any) -> "subprocess.Popen[bytes]":
    source = more.pop("source", f"{BUCKET}/rows.jsonl")
    words = [sys.executable, "-m", "benchmarks.store_kill", "--run", source, output]
    words += ["--max-tokens", str(arguments.max_tokens)]
    with (disk / LOG_FILE).open("wb") as log:
        return subprocess.Popen(
            words, env=os.environ | {"TMPDIR": str(disk)}, start_new_session=True, stderr=log, **more
        )


def _second_driver(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    disk = folder / "disk-of-the-second"
    disk.mkdir()
    driver = _driver(arguments, disk, f"{BUCKET}/out")
    driver.wait()
    return {"exit_code": driver.returncode, "says": _last_log_line(disk)}


def _last_log_line(disk: Path) -> str:
    lines = (disk / LOG_FILE).read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _end(driver: "subprocess.Popen[bytes]") -> None:
    """Kill the processes that a killed driver has left running."""
    driver.wait()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == driver.pid:
                process.kill()
        except (OSError, psutil.Error):
            continue


def _ids(output: str) -> list[str]:
    shards = locate_url(output).glob("rows/part-*")
    return [id for path in shards for id in pq.read_table(BytesIO(path.read_bytes()))["id"].to_pylist()]


if __name__ == "__main__":
    run_program("benchmarks.store_kill", main)

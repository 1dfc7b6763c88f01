"""Measure a decoding step beside other work on the same cores, with one thread and with one per core, in turns.

    python -m benchmarks.neighbours --model smollm2 --json neighbours.json

Conditions: a quiet machine; a busy process on one core; a busy process on each; a second engine that decodes; and a
quota of one core (as root, with a writable cgroup of version 1 or 2). Each engine is a process with the environment of
the engines of an endpoint. One thread alone is the rival: more threads should never be slower.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.report import command_line, write_report
from mars_ray.engine.core.load import start_engine
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.process.engine_process import SPIN
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import ConfigError, RunError
from mars_ray.measure import spread
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine
from mars_ray.usable_cpus import usable_cpus

BUSY = [sys.executable, "-c", "while True: pass"]
MOST_ROWS = 16
CONTEXT = 128
"""Prompt tokens of each sequence."""
PERIOD_US = 100_000
"""Period of a quota, as container runtimes set it."""

Runs = dict[str, dict[str, list[dict[str, float]]]]
"""Figures of each round by condition and number of threads."""


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, model: str, threads: int) -> None:
        environment = SPIN | os.environ | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "benchmarks.neighbours", "--model", model, "--worker", str(threads)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def begin(self, rows: int, seconds: float) -> None:
        """Begin to decode `rows` sequences for some seconds."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # `steps_ms` reports an engine that has ended
            self.process.stdin.write(f"{rows} {seconds}\n")
            self.process.stdin.flush()

    def steps_ms(self) -> list[float]:
        """Wait for the end, and return the milliseconds of each step. Raises a `RunError` if the engine has ended."""
        assert self.process.stdout
        if line := self.process.stdout.readline():
            steps: list[float] = json.loads(line)
            return steps
        raise RunError(f"an engine ended with status {self.process.wait()}; its message is above.")

    def measure(self, rows: int, seconds: float) -> list[float]:
        """Decode `rows` sequences for some seconds, and return the milliseconds of each step."""
        self.begin(rows, seconds)
        return self.steps_ms()


def work(name: str, threads: int) -> None:
    """Serve the parent until it closes standard input: decode, and print the milliseconds of each step."""
    import torch

    torch.set_num_threads(threads)
    out, sys.stdout = sys.stdout, sys.stderr
    model = check_folder(resolve_model(name), "auto", "cpu")
    engine, _ = start_engine(model, EngineOptions(engine="mars", max_num_seqs=MOST_ROWS), {})
    number = 0
    for line in sys.stdin:
        rows, seconds = line.split()
        for _ in range(int(rows)):
            number += 1
            prompt = tuple(1 + (number * 31 + position * 7) % 400 for position in range(CONTEXT))
            sampling = SamplingParams(max_tokens=engine.limits.max_model_len - CONTEXT - 1, ignore_eos=True)
            engine.add(Request(id=str(number), prompt=prompt, sampling=sampling, decode=DecodeParams(mode=Mode.AR)))
        while engine.running < int(rows):
            engine.step()
        engine.step()
        steps = []
        ends_s = time.perf_counter() + float(seconds)
        while (began_s := time.perf_counter()) < ends_s:
            engine.step()
            steps.append(1000 * (time.perf_counter() - began_s))
        for each in range(number - int(rows) + 1, number + 1):
            engine.cancel(str(each))
        engine.step()
        print(json.dumps(steps), file=out, flush=True)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` processes busy."""
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def decoding(other: EngineProcess, rows: int, seconds: float) -> Iterator[None]:
    """Let another engine decode meanwhile."""
    other.begin(rows, seconds + 1)
    try:
        yield
    finally:
        other.steps_ms()


@contextmanager
def quota(cpus: float, pid: int) -> Iterator[None]:
    """Limit a process to some CPUs. Raises `OSError` where cgroups cannot be written."""
    root = Path("/sys/fs/cgroup")
    is_2 = (root / "cgroup.controllers").exists()
    parent = root if is_2 else root / "cpu"
    group = parent / f"neighbours-{os.getpid()}"
    group.mkdir()
    try:
        limit = int(cpus * PERIOD_US)
        if is_2:
            (group / "cpu.max").write_text(f"{limit} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(limit))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with suppress(OSError):
            (parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def bench(model: str, rows: int, seconds: float, rounds: int) -> Runs:
    """Measure, and return the median and the 95th percentile of the steps of each round."""
    if not 1 <= rows <= MOST_ROWS:
        raise ConfigError(f"rows is {rows}; it must be in 1..{MOST_ROWS}.")
    most = usable_cpus()
    threads = {"1 thread": 1, f"{most} threads": most}
    engines = {name: EngineProcess(model, count) for name, count in threads.items()}
    others = {name: EngineProcess(model, count) for name, count in threads.items()}
    conditions: dict[str, Callable[[str], AbstractContextManager[None]]] = {
        "quiet": lambda _: nullcontext(),
        "a busy neighbour": lambda _: busy(1),
        f"{most} busy neighbours": lambda _: busy(most),
        "another engine": lambda name: decoding(others[name], rows, seconds),
        "quota of 1 CPU": lambda name: quota(1, engines[name].process.pid),
    }
    found: Runs = {each: {name: [] for name in threads} for each in conditions}
    names = list(threads)
    try:
        for engine in (*engines.values(), *others.values()):
            engine.measure(rows, 2)
        with ProgressLine("runs", total=rounds * len(conditions) * len(threads)) as progress:
            for done in range(rounds * len(conditions) * len(threads)):
                number, rest = divmod(done, len(conditions) * len(threads))
                condition = list(conditions)[rest // len(threads)]
                name = names[(rest + number) % len(threads)]
                try:
                    with conditions[condition](name):
                        steps = sorted(engines[name].measure(rows, seconds))
                except OSError:  # no cgroup can be written
                    continue
                found[condition][name].append(
                    {
                        "median_ms": median(steps),
                        "p95_ms": steps[int(0.95 * len(steps))],
                        "most_ms": steps[-1],
                        "tokens_per_s": 1000 * rows * len(steps) / sum(steps),
                    }
                )
                progress.update(done + 1, {condition: f"{median(steps):.1f} ms"})
    finally:
        for engine in (*engines.values(), *others.values()):
            engine.process.kill()
            engine.process.wait()
    return found


def show(found: Runs) -> None:
    """Print the medians of the rounds with their ranges."""
    columns = ("", "threads", "tokens/s", "step, ms", "95th percentile", "longest")
    table = Table(*columns, title=command_line())
    for condition, by_name in found.items():
        for name, runs in by_name.items():
            figures = ("tokens_per_s", "median_ms", "p95_ms", "most_ms")
            cells = [spread([run[figure] for run in runs]) for figure in figures] if runs else []
            table.add_row(condition, name, *(f"{each.median:.1f} ({each.min:.1f}-{each.max:.1f})" for each in cells))
        table.add_section()
    Console().print(table)


def main() -> None:
    """Measure, print, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=1, help="sequences in a step")
    parser.add_argument("--seconds", type=float, default=4, help="seconds of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for every sample")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.model, options.worker)
        return
    found = bench(options.model, options.rows, options.seconds, options.rounds)
    show(found)
    write_report(options.json, {"runs": found})


if __name__ == "__main__":
    run_program("benchmarks.neighbours", main)

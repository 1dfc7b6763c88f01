"""Compare a generate job and a pipeline stage with the bare engine on the same rows.

    python -m benchmarks.batch_throughput --rows 4000 --repeats 3 --json benchmarks/results/DATE-batch-throughput.json

The bundled model answers prompts of its own tasks at threshold 0.95, one thread for each engine. The bare engine gets
requests that were tokenised beforehand, in a process that does nothing else. Throughput is steady-state throughput: it
counts from the moment when a quarter of the tokens has arrived, so every engine is running, until nine tenths have
arrived, so every engine still has work. Contenders take turns.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import ray.data
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_report
from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.rows.plain_format import PlainFormat, PlainFormatSettings
from mars_ray.batch.run.options import GenerateOptions, WorkerOptions
from mars_ray.data.tasks.split import mixture
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.measure import deviation
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.ray_cluster import connect
from mars_ray.ray_data import ProcessorConfig, build_processor

SAMPLING = SamplingParams(max_tokens=64)
DECODE = DecodeParams(threshold=0.95)
CONTENDERS = ("bare engine", "2 bare engines", "1 worker", "2 workers", "1 in a stage", "2 in a stage")


def main() -> None:
    """Compare, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure_one(arguments.one, arguments.source)))
        return
    rates_by_name: dict[str, list[float]] = {name: [] for name in arguments.contenders}
    with TemporaryDirectory() as folder:
        source = Path(folder) / "rows.jsonl"
        with source.open("w") as file:
            for number, example in enumerate(islice(mixture("train", 0), arguments.rows)):
                file.write(json.dumps({"id": str(number), "prompt": example.prompt}) + "\n")
        for _ in range(arguments.repeats):
            for name in arguments.contenders:
                process = subprocess.run(contender_command(name, source), stdout=subprocess.PIPE, check=True, text=True)
                rates_by_name[name].append(json.loads(process.stdout.splitlines()[-1]))
    first = arguments.contenders[0]
    table = Table(title=f"{arguments.rows} rows, {arguments.repeats} times")
    for column in ("", "tokens/s", f"of {first}"):
        table.add_column(column, justify="right")
    for name, rates in rates_by_name.items():
        table.add_row(
            name, f"{mean(rates):,.0f} ± {deviation(rates):,.0f}", f"{mean(rates) / mean(rates_by_name[first]):.2f} x"
        )
    Console().print(table)
    write_report(arguments.json, {"tokens_per_s": rates_by_name})


def contender_command(name: str, source: Path) -> list[str]:
    """Return the command that measures one contender in a process of its own."""
    return [sys.executable, "-m", "benchmarks.batch_throughput", "--one", name, "--source", str(source)]


def measure_one(name: str, source: Path) -> float:
    """Return the tokens per second of one contender."""
    if name == "bare engine":
        return bare_engine(source)
    if name == "2 bare engines":
        # The throughput of two cores that run only engines.
        command = contender_command("bare engine", source)
        engines = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        return sum(float(engine.communicate()[0].splitlines()[-1]) for engine in engines)
    return stage(source, int(name[0])) if name.endswith("stage") else job(source, int(name[0]))


def bare_engine(source: Path) -> float:
    """Decode all rows in this process; return tokens per second."""
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(resolve_model("bundled"))
    settings = PlainFormatSettings(sampling=SAMPLING, decode=DECODE)
    row_format = PlainFormat(settings, checkpoint.tokenizer)
    requests = [row_format.parse(str(n), raw).request for n, raw in enumerate(source.read_bytes().splitlines())]
    engine = Engine(checkpoint, EngineOptions())
    pace = []
    for chunks in run_steps(engine, requests):
        tokens = sum(chunk.finished.tokens for chunk in chunks if chunk.finished)
        pace.append((time.monotonic(), tokens))
    return steady(pace)


def job(source: Path, workers: int) -> float:
    """Run a job and return its steady-state tokens per second."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        options = GenerateOptions(
            input=(str(source),),
            output=output,
            sampling=SAMPLING,
            decode=DECODE,
            workers=WorkerOptions(count=workers),
        )
        report = generate_files(options)
    return steady([(point.second, point.tokens) for point in report.pace])


def stage(source: Path, workers: int) -> float:
    """Run a pipeline of only our stage; return tokens per second."""
    connect()
    processor = build_processor(ProcessorConfig(threshold=0.95, sampling=SAMPLING, concurrency=workers))
    pace = []
    for block in processor(ray.data.read_json(str(source))).iter_batches(batch_size=None, batch_format="pyarrow"):
        pace.append((time.monotonic(), sum(block["tokens"].to_pylist())))
    return steady(pace)


def steady(pace: Sequence[tuple[float, int]]) -> float:
    """Return the tokens per second in the middle of a run, from times and token counts."""
    seconds, tokens = zip(*pace, strict=True)
    totals = list(accumulate(tokens))
    first, last = (next(n for n, total in enumerate(totals) if total >= share * totals[-1]) for share in (0.25, 0.9))
    return float((totals[last] - totals[first]) / (seconds[last] - seconds[first]))


if __name__ == "__main__":
    run_program("benchmarks.batch_throughput", main)

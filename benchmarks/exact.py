"""Compare exact mode with one token at a time in the same engine; lossless decoding must not be slower.

    python -m benchmarks.exact --model bundled --model shape:100m --json exact.json

A shape is a network with random weights that replays the proposals of the bundled model
(`benchmarks/decode/replay.py`). Both modes run in turns on one thread.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode.contenders import engine_contender, subject
from benchmarks.report import write_report
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.measure import deviation, interleaved, throughput
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine

BATCHES = (1, 4, 16, 32, 64)
REQUESTS_PER_ROW = 4
REQUESTS_LEAST = 24
REQUESTS_MOST = 240


def measure(model: str, dtype: DtypeOrAuto, batch: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one batch."""
    requests = min(max(REQUESTS_PER_ROW * batch, REQUESTS_LEAST), REQUESTS_MOST)
    case = subject(model, requests, dtype)
    candidates = {mode.value: engine_contender(case, batch, DecodeParams(mode=mode)) for mode in (Mode.AR, Mode.EXACT)}
    with ProgressLine(f"{model}, batch {batch}", total=2 * (rounds + 1)) as progress:
        samples = interleaved(candidates, rounds, progress)
    times = [exact.tokens_per_s / ar.tokens_per_s for exact, ar in zip(samples["exact"], samples["ar"], strict=True)]
    return {
        "model": model,
        "dtype": dtype,
        "batch": batch,
        "requests": requests,
        "tokens": case.workload.tokens,
        "tokens_per_s": {name: asdict(throughput(runs)) for name, runs in samples.items()},
        "tokens_per_forward": sum(sample.tokens for sample in samples["exact"])
        / sum(sample.forwards for sample in samples["exact"]),
        "times": {"mean": mean(times), "std": deviation(times), "min": min(times), "max": max(times)},
        "rounds": rounds,
    }


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description="Compare exact mode with one token at a time.")
    parser.add_argument("--model", action="append", help="bundled, a folder, or shape:100m; may be repeated")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"exact against ar, {arguments.dtype}, {arguments.rounds} rounds in turns, one thread")
    for column in ("model", "batch", "ar, tokens/s", "exact, tokens/s", "tokens per forward", "times"):
        table.add_column(column, justify="left" if column == "model" else "right")
    batches = []
    for model in arguments.model or ["bundled"]:
        for batch in arguments.batch or BATCHES:
            batches.append(measure(model, arguments.dtype, batch, arguments.rounds))
            rate = batches[-1]["tokens_per_s"]
            times = batches[-1]["times"]
            table.add_row(
                model,
                str(batch),
                f"{rate['ar']['median']:,.0f}",
                f"{rate['exact']['median']:,.0f}",
                f"{batches[-1]['tokens_per_forward']:.2f}",
                f"{times['mean']:.2f} ± {times['std']:.2f}",
            )
    Console().print(table)
    write_report(arguments.json, {"threads": 1, "batches": batches})


if __name__ == "__main__":
    run_program("benchmarks.exact", main)

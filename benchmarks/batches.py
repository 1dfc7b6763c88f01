"""Measure what a batch costs callers, and what an idle endpoint gives a batch, in turns with the same without.

    python -m benchmarks.batches --rate 4 --json batches.json    # while `mars-ray serve` with storage is idle

Callers arrive at `--rate` requests per second, which should be half of what the endpoint can serve (`mars-ray bench
serve`). Each round measures their latency without and with a batch, the rows per second of a batch on the idle
endpoint, and the rows per second of `mars-ray generate` with the same rows.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from openai import OpenAI
from openai.types.batch import Batch

from benchmarks.report import write_report
from mars_ray.data.prompt_file import read_prompts
from mars_ray.errors import ConfigError, RunError
from mars_ray.load.arrivals import Poisson
from mars_ray.load.client import Target, find_model, parse_url
from mars_ray.load.generator import run_load
from mars_ray.load.plan import bundled_prompts, closed_loop, poisson
from mars_ray.load.record import RequestOutcome
from mars_ray.measure import spread
from mars_ray.model.resolve import short_name
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine

URL: Literal["/v1/chat/completions"] = "/v1/chat/completions"
MAX_TOKENS = 128
THRESHOLD = 0.95
"""Threshold of the rows, of a batch and of `generate`."""
ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.1


class BatchBench:
    """One endpoint under measurement."""

    def __init__(self, url: str, model: str, rate: float, callers: int, rows: int, seed: int) -> None:
        self._url = url
        self._local_model = model
        self._model = asyncio.run(find_model(url, None, short_name(model))).name
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)
        self._rate = Poisson(rate)
        self._callers = callers
        self._seed = seed
        self._prompts = read_prompts(bundled_prompts())
        planned = closed_loop(self._prompts, seed, rows, MAX_TOKENS).requests
        self._lines = [
            json.dumps(
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": URL,
                    "body": {
                        "model": self._model,
                        "messages": request.messages,
                        "max_tokens": MAX_TOKENS,
                        "temperature": 0,
                        "threshold": THRESHOLD,
                    },
                }
            )
            for number, request in enumerate(planned)
        ]

    def round(self, number: int) -> dict[str, float]:
        """Return the figures of one round. Every second round measures in the opposite order."""
        parts = [self._callers_alone, self._callers_and_batch, self._batch_alone, self._generate]
        figures: dict[str, float] = {}
        for part in parts if number % 2 == 0 else parts[::-1]:
            figures |= part()
        return figures

    def _callers_alone(self) -> dict[str, float]:
        return {"p95_alone_s": self._p95_s()}

    def _callers_and_batch(self) -> dict[str, float]:
        batch = self._begin(self._lines)
        began_s = time.monotonic()
        p95_s = self._p95_s()
        now = self._client.batches.retrieve(batch.id)
        seconds = time.monotonic() - began_s
        done = now.request_counts.completed if now.request_counts else 0
        if now.status in ENDED or done == len(self._lines):
            raise RunError("the batch ended before the callers; raise --rows.")
        self._client.batches.cancel(batch.id)
        self._wait(batch)
        return {"p95_with_batch_s": p95_s, "rows_per_s_beside_callers": done / seconds}

    def _batch_alone(self) -> dict[str, float]:
        began_s = time.monotonic()
        batch = self._wait(self._begin(self._lines))
        if batch.status != "completed" or batch.error_file_id:
            raise RunError(f"the batch is {batch.status} with {batch.request_counts}.")
        return {"rows_per_s_batch": len(self._lines) / (time.monotonic() - began_s)}

    def _generate(self) -> dict[str, float]:
        with TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.jsonl"
            rows.write_text("\n".join(self._lines))
            output = Path(folder) / "out"
            command = [sys.executable, "-m", "mars_ray", "generate", "--model", self._local_model]
            command += ["--input", str(rows), "--output", str(output)]
            subprocess.run(command, check=True, capture_output=True)
            report = json.loads((output / "report.json").read_text())
        return {"rows_per_s_generate": report["rows"] / report["seconds"]}

    def _p95_s(self) -> float:
        plan = poisson(self._rate, self._prompts, self._seed, self._callers, None, MAX_TOKENS)
        target = Target(url=self._url, model=self._model, stream=True, extra_body={"temperature": 0})
        records = asyncio.run(run_load(target, plan.requests))
        if failed := [record for record in records if record.outcome is not RequestOutcome.OK]:
            raise RunError(f"{len(failed)} of {len(records)} requests failed, the first with {failed[0].error!r}.")
        return float(np.percentile([record.e2e_s for record in records], 95))

    def _begin(self, lines: Sequence[str]) -> Batch:
        file = self._client.files.create(file=("rows.jsonl", "\n".join(lines).encode()), purpose="batch")
        return self._client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")

    def _wait(self, batch: Batch) -> Batch:
        while (now := self._client.batches.retrieve(batch.id)).status not in ENDED:
            time.sleep(POLL_S)
        return now


def bench_batches(url: str, model: str, rate: float, callers: int, rows: int, rounds: int, seed: int) -> dict[str, Any]:
    """Measure, print, and return the report. Raises an `InputError`, or a `RunError` when a request fails."""
    for name, value in {"rate": rate, "callers": callers, "rows": rows, "rounds": rounds}.items():
        if value <= 0:
            raise ConfigError(f"{name} is {value}; it must be above 0.")
    bench = BatchBench(parse_url(url), model, rate, callers, rows, seed)
    figures: list[dict[str, float]] = []
    with ProgressLine("rounds", total=rounds) as progress:
        for number in range(rounds):
            figures.append(bench.round(number))
            progress.update(number + 1, {name: f"{value:.3g}" for name, value in figures[-1].items()})
    latency = spread([each["p95_with_batch_s"] / each["p95_alone_s"] for each in figures])
    speed = spread([each["rows_per_s_batch"] / each["rows_per_s_generate"] for each in figures])
    print(f"p95 of callers with a batch, of that without: {latency.median:.2f} ({latency.min:.2f}-{latency.max:.2f})")
    print(f"rows/s of a batch, of generate's: {speed.median:.2f} ({speed.min:.2f}-{speed.max:.2f})")
    return {
        "p95_ratio": asdict(latency),
        "rows_per_s_ratio": asdict(speed),
        "rounds": figures,
    }


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="an idle `mars-ray serve` with storage")
    parser.add_argument("--model", default="bundled", help="the model it serves")
    parser.add_argument("--rate", type=float, required=True, help="callers' requests per second: half of the capacity")
    parser.add_argument("--callers", type=int, default=200, help="callers' requests per measurement")
    parser.add_argument("--rows", type=int, default=1000, help="rows of a batch")
    parser.add_argument("--rounds", type=int, default=3, help="rounds")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and arrivals")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    counts = (options.callers, options.rows, options.rounds, options.seed)
    write_report(options.json, bench_batches(options.url, options.model, options.rate, *counts))


if __name__ == "__main__":
    run_program("benchmarks.batches", main)

"""Measure the cost of traces: two running endpoints, one with traces and one without, in turns.

    mars-ray serve                                                                     # in one terminal, on port 8000
    OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 mars-ray serve --port 8001       # in another, with a collector
    python -m benchmarks.trace_overhead --on http://127.0.0.1:8001 --json traces.json

Both get the same prompts in the same order at threshold 1, with the same number of requests in flight. Answers are
short, so the gateway has much to do for each token: with longer answers, traces cost a smaller share.
"""

import argparse
import asyncio
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import write_report
from benchmarks.serve_overhead import PINNED, load_endpoint
from mars_ray.data.prompt_file import read_prompts
from mars_ray.errors import ConfigError
from mars_ray.load.client import Target, find_model, parse_url
from mars_ray.load.plan import bundled_prompts, closed_loop
from mars_ray.measure import Sample, interleaved, speedup
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine

OFF = "traces off"
ON = "traces on"


def bench_traces(urls: dict[str, str], clients: int, requests: int, rounds: int, max_tokens: int) -> dict[str, Any]:
    """Measure, print, and return the figures. Raises an `InputError`, or a `RunError` when a request fails."""
    for name, value in {"clients": clients, "requests": requests, "rounds": rounds, "max_tokens": max_tokens}.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    planned = list(closed_loop(read_prompts(bundled_prompts()), 0, requests, max_tokens).requests)

    def sample(url: str) -> Sample:
        async def run() -> Sample:
            model = (await find_model(url, None, None)).name
            target = Target(url=url, model=model, stream=True, extra_body=PINNED)
            return await load_endpoint(target, planned, clients)

        return asyncio.run(run())

    runs = {name: partial(sample, parse_url(url)) for name, url in urls.items()}
    with ProgressLine("runs", total=len(runs) * (rounds + 1)) as progress:
        samples = interleaved(runs, rounds, progress)
    ratio = speedup(samples[ON], samples[OFF])
    print(f"with traces: {ratio.median:.3f} ({ratio.min:.3f}-{ratio.max:.3f}) of the tokens per second without")
    return {
        "ratio": asdict(ratio),
        "samples": {name: [asdict(each) for each in of_name] for name, of_name in samples.items()},
    }


def main() -> None:
    """Measure, print, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--off", default="http://127.0.0.1:8000", help="an idle endpoint without traces")
    parser.add_argument("--on", default="http://127.0.0.1:8001", help="an idle endpoint with traces")
    parser.add_argument("--clients", type=int, default=16, help="requests in flight")
    parser.add_argument("--requests", type=int, default=500, help="requests per round")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that warms up")
    parser.add_argument("--max-tokens", type=int, default=16, help="length of an answer")
    parser.add_argument("--json", type=Path, help="file for every sample")
    options = parser.parse_args()
    counts = (options.clients, options.requests, options.rounds, options.max_tokens)
    write_report(options.json, bench_traces({OFF: options.off, ON: options.on}, *counts))


if __name__ == "__main__":
    run_program("benchmarks.trace_overhead", main)

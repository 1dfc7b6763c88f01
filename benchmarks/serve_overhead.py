"""Measure the overhead of serving: a running endpoint and its engine alone, in turns.

    python -m benchmarks.serve_overhead --clients 16 --json overhead.json    # while `mars-ray serve` is idle

Both decode greedily at threshold 1 the same prompts in the same order, with the same number of requests in flight.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_report
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import read_prompts
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import ConfigError, RunError
from mars_ray.load.client import Target, find_model, parse_url
from mars_ray.load.generator import run_load
from mars_ray.load.plan import bundled_prompts, closed_loop
from mars_ray.load.record import PlannedRequest, RequestOutcome
from mars_ray.measure import Sample, Spread, interleaved, speedup, throughput
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine

MAX_TOKENS = 128
UNSTREAMED = "served, not streamed"
STREAMED = "served, streamed"
ALONE = "engine alone"
PINNED = {"temperature": 0, "threshold": 1.0}
"""Fields of each request. The threshold keeps the controller from changing the work while it is measured."""
SAME = EngineOptions()
"""Default options of an endpoint's engine."""


def bench_overhead(
    url: str, model: str, clients: int, requests: int, rounds: int, seed: int, engine_options: EngineOptions = SAME
) -> dict[str, Any]:
    """Measure, print, and return the figures. Raises an `InputError`, or a `RunError` when a request fails."""
    for name, value in {"clients": clients, "requests": requests, "rounds": rounds}.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    url = parse_url(url)
    model_name = asyncio.run(find_model(url, None, None)).name
    prompts = read_prompts(bundled_prompts())
    planned = list(closed_loop(prompts, seed, requests, MAX_TOKENS).requests)
    engine = _EngineAlone(model, planned, clients, engine_options)

    def endpoint_sample(stream: bool) -> Sample:
        target = Target(url=url, model=model_name, stream=stream, extra_body=PINNED)
        return asyncio.run(load_endpoint(target, planned, clients))

    with ProgressLine("runs", total=3 * (rounds + 1)) as progress:
        samples = interleaved(
            {UNSTREAMED: lambda: endpoint_sample(False), STREAMED: lambda: endpoint_sample(True), ALONE: engine.run},
            rounds,
            progress,
        )
    ratios = {name: speedup(samples[name], samples[ALONE]) for name in (UNSTREAMED, STREAMED)}
    _show(f"{model}, {clients} clients, {requests} requests, {rounds} rounds", samples, ratios)
    return {
        "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
        "samples": {name: [asdict(sample) for sample in runs] for name, runs in samples.items()},
    }


async def load_endpoint(target: Target, planned: Sequence[PlannedRequest], clients: int) -> Sample:
    """Send all requests, `clients` at a time, and return their tokens and time. Raises `RunError` if one fails."""
    records = await run_load(target, planned, clients=clients)
    if failed := [record for record in records if record.outcome is not RequestOutcome.OK]:
        raise RunError(f"{len(failed)} of {len(records)} requests failed, the first with {failed[0].error!r}.")
    tokens = [(record.completion_tokens or 0, record.tokens_per_forward or 1.0) for record in records]
    return Sample(
        tokens=sum(count for count, _ in tokens),
        seconds=max(record.end_s for record in records),
        forwards=round(sum(count / rate for count, rate in tokens)),
    )


class _EngineAlone:
    """An engine in this process, driven by a loop instead of a server."""

    def __init__(
        self, model: str, planned: Sequence[PlannedRequest], clients: int, engine_options: EngineOptions
    ) -> None:
        torch.set_num_threads(1)
        checkpoint = load_checkpoint(resolve_model(model))
        encoder = ChatEncoder(checkpoint.tokenizer)
        self._prompts = [tuple(encoder.prompt(list(request.messages))) for request in planned]
        self._clients = clients
        self._engine = Engine(checkpoint, engine_options)

    def run(self) -> Sample:
        """Decode all prompts, up to `clients` of them at a time."""
        engine = self._engine
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        decode = DecodeParams(threshold=PINNED["threshold"])
        requests = (
            Request(id=str(number), prompt=prompt, sampling=sampling, decode=decode)
            for number, prompt in enumerate(self._prompts)
        )
        tokens = forwards = 0
        started_s = time.perf_counter()
        for chunks in run_steps(engine, requests, at_a_time=self._clients):
            for ended in filter(None, (chunk.finished for chunk in chunks)):
                tokens += ended.tokens
                forwards += ended.forwards
        return Sample(tokens=tokens, seconds=time.perf_counter() - started_s, forwards=forwards)


def main() -> None:
    """Measure, print, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="an idle `mars-ray serve`")
    parser.add_argument("--model", default="bundled", help="the model it serves")
    parser.add_argument("--clients", type=int, default=16, help="requests in flight")
    parser.add_argument("--requests", type=int, default=500, help="requests per round")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of prompts")
    parser.add_argument("--json", type=Path, help="file for every sample")
    options = parser.parse_args()
    counts = (options.clients, options.requests, options.rounds)
    write_report(options.json, bench_overhead(options.url, options.model, *counts, options.seed))


def _show(title: str, samples: dict[str, list[Sample]], ratios: dict[str, Spread]) -> None:
    table = Table(title=title)
    for column in ("", "tokens/s", "of the engine alone"):
        table.add_column(column, justify="right" if column else "left")
    for name, runs in samples.items():
        ratio = ratios.get(name)
        table.add_row(name, _range(throughput(runs), ".0f"), _range(ratio, ".2f") if ratio else "")
    Console().print(table)


def _range(spread: Spread, form: str) -> str:
    return f"{spread.median:{form}} ({spread.min:{form}}-{spread.max:{form}})"


if __name__ == "__main__":
    run_program("benchmarks.serve_overhead", main)

"""Compare policies on an endpoint over a day in small: a load that rises above what the engines can serve, and falls.

    python -m benchmarks.day --model coder.gguf --adapter qwen2.5-coder-0.5b-instruct --quantize int8 --engines 2 \\
        --tasks humaneval --data DIR --allow-code-execution --json benchmarks/results/DATE-day.json

Each policy runs on a cluster of its own, one after the other; nothing else may run meanwhile. All get the same
questions at the same times, each question once. The load of each part of the day is a multiple (`SHARES`) of what the
engines can serve at threshold 1, measured in a closed loop. Answers are judged as in `mars-ray evaluate`; a question
without an answer in full counts as wrong. The processors are shared equally by the engines.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from benchmarks.report import write_report
from benchmarks.served import Sampler, closed_loop_rate, endpoint, policy_args, replicas, send
from mars_ray.evaluation.code_check import check_sandbox
from mars_ray.evaluation.metrics import mcnemar
from mars_ray.evaluation.scorer import is_right
from mars_ray.evaluation.tasks import Question, TaskOptions, open_tasks
from mars_ray.load.plan import LoadPlan
from mars_ray.load.record import PlannedRequest, RequestOutcome, RequestRecord, RequestSlo, parse_slo
from mars_ray.load.summary import summarize
from mars_ray.program import run_program
from mars_ray.usable_cpus import usable_cpus

AR = "ar"
LOWER = "fixed, lower"
POLICIES: dict[str, dict[str, Any]] = {
    AR: {"threshold": 1.0, "policy": "fixed"},
    "fixed 1.0": {"threshold": 1.0, "policy": "fixed"},
    LOWER: {"policy": "fixed"},
    "capacity": {"threshold": 1.0, "policy": "capacity"},
}
SHARES = (0.5, 0.8, 1.1, 1.4, 1.1, 0.8, 0.5)
"""Load in each part of the day, in multiples of the capacity at threshold 1. All parts are equally long."""
ROWS = 8
WARM_UP = 16


def main() -> None:
    """Run the day with each policy, print a table after each, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", help="name or folder")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--tasks", default="humaneval", help="tasks as in `mars-ray evaluate`")
    parser.add_argument("--data", type=Path, help="folder of the benchmarks")
    parser.add_argument("--allow-code-execution", action="store_true", help="run HumanEval's tests in the sandbox")
    parser.add_argument("--questions", type=int, help="the first so many questions; all without it")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="repeatable; all without it")
    parser.add_argument("--lower", type=float, default=0.1, help="threshold of a constant, and the floor of `capacity`")
    parser.add_argument("--slo", default="ttft:2000,tpot:100")
    parser.add_argument("--seed", type=int, default=0, help="seed of the arrivals")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    slo = parse_slo(arguments.slo.split(","))
    assert slo is not None
    questions = questions_of(arguments)
    most = arguments.max_tokens
    requests = [PlannedRequest(messages=question.messages, max_tokens=most) for question in questions]
    capacity = None
    days: dict[str, dict[str, Any]] = {}
    for name in arguments.policy or POLICIES:
        args, engine = deployment(arguments, {"threshold": arguments.lower} | POLICIES[name], slo)
        body = {"mode": "ar"} if name == AR else {}
        with endpoint(args, engine):
            rate = capacity_of(requests, arguments.engines)  # of every policy, as it is the warm-up
            capacity = capacity or rate
            planned = plan(requests, capacity, arguments.seed)
            with Sampler() as sampler:
                records = send(planned, body=body)
            reports = replicas()
        days[name] = figures(questions, records, slo) | {"seconds": sampler.seconds, "replicas": reports}
        show(days, len(questions))
        report = {"slo": asdict(slo), "capacity_requests_per_s": capacity, "shares": SHARES, "days": days}
        write_report(arguments.json, report)


def questions_of(arguments: argparse.Namespace) -> list[Question]:
    """Return the questions of all tasks."""
    options = TaskOptions(seeds=1, data=arguments.data, allow_code_execution=arguments.allow_code_execution)
    tasks = open_tasks(arguments.tasks.split(","), options)
    if arguments.allow_code_execution:
        check_sandbox()
    return [question for task in tasks for question in task.questions][: arguments.questions]


def deployment(
    arguments: argparse.Namespace, policy: dict[str, Any], slo: RequestSlo
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the endpoint, and the deployment of its engines."""
    threads = max(1, usable_cpus() // arguments.engines)
    engine = {"threads": threads, "quantize": arguments.quantize, "max_num_seqs": ROWS}
    args = policy_args(policy, slo, arguments.lower) | {"model": arguments.model, "engine": engine}
    if arguments.adapter:
        args["adapter"] = arguments.adapter
    return args, {"num_replicas": arguments.engines, "ray_actor_options": {"num_cpus": 0.1}}


def capacity_of(requests: Sequence[PlannedRequest], engines: int) -> float:
    """Return the answers per second at threshold 1 with all slots in use, after as many answers that do not count."""
    count = WARM_UP * engines
    return closed_loop_rate(requests[:count], requests[count : 2 * count] or requests[:count], ROWS * engines)


def plan(requests: Sequence[PlannedRequest], capacity: float, seed: int) -> LoadPlan:
    """Return each request once, at times of a Poisson process whose rate follows `SHARES`."""
    drawn = random.Random(seed)
    part_s = len(requests) / capacity / sum(SHARES)
    parts = drawn.choices(range(len(SHARES)), SHARES, k=len(requests))
    times_s = sorted((part + drawn.random()) * part_s for part in parts)
    planned = (replace(request, scheduled_s=time_s) for request, time_s in zip(requests, times_s, strict=True))
    return LoadPlan(planned, len(requests))


def figures(questions: Sequence[Question], records: Sequence[RequestRecord], slo: RequestSlo) -> dict[str, Any]:
    """Return what the clients saw, with the verdict on each answer."""
    right = [
        record.outcome is RequestOutcome.OK and is_right(question, record.text)
        for question, record in zip(questions, records, strict=True)
    ]
    summary = summarize(records, slo)
    assert summary.goodput is not None
    ttft = summary.latency_ms.ttft_arrival
    tpot = summary.latency_ms.tpot
    return {
        "right": right,
        "interval": list(binomtest(sum(right), len(right)).proportion_ci(method="wilson")),
        "answered": sum(record.outcome is RequestOutcome.OK for record in records),
        "in_time": summary.goodput.fraction,
        "tokens_per_s": summary.output_tokens_per_s,
        "tokens_per_forward": summary.tokens_per_forward,
        "ttft_ms": ttft and asdict(ttft),
        "tpot_ms": tpot and asdict(tpot),
        "duration_s": summary.duration_s,
        "errors": summary.errors,
        "samples": [asdict(replace(record, text="", chunk_s=record.chunk_s[:1])) for record in records],
    }


def show(days: dict[str, dict[str, Any]], asked: int) -> None:
    """Print a table of the policies so far."""
    table = Table(
        "policy", "right", "p", "in time", "answered", "tokens/s", "tokens/forward", "TTFT p50, p90", "threshold"
    )
    first = next(iter(days.values()))["right"]
    for name, day in days.items():
        low, high = day["interval"]
        better = sum(b and not a for a, b in zip(first, day["right"], strict=True))
        worse = sum(a and not b for a, b in zip(first, day["right"], strict=True))
        tokens = sum(tokens for _, tokens in day["seconds"])
        threshold = sum(threshold * tokens for threshold, tokens in day["seconds"]) / tokens
        ttft = day["ttft_ms"] or {"median": 0, "p90": 0}
        table.add_row(
            name,
            f"{sum(day['right'])} ({100 * low:.0f}-{100 * high:.0f} %)",
            f"{mcnemar(better, worse):.2g}",
            f"{day['in_time']:.1%}",
            f"{day['answered']} of {asked}",
            f"{day['tokens_per_s']:.1f}",
            f"{day['tokens_per_forward'] or 1:.2f}",
            f"{ttft['median']:.0f}, {ttft['p90']:.0f}",
            f"{threshold:.3f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    run_program("benchmarks.day", main)

"""Compare policies on two real engines behind an endpoint, and with a simulation of the same load.

The load is the busiest part of real traces. The simulation uses the step times and profiles that the engines reported.

    python -m benchmarks.policy_real TRACE.csv.gz [TRACE.csv.gz ...] --json benchmarks/results/DATE-policy-real.json
    python -m benchmarks.policy_real TRACE.csv.gz --model smollm2 --adapter smollm2 --prompts val.jsonl.gz \\
        --machine smollm2.json --json benchmarks/results/DATE-policy-real-smollm2.json
    python -m benchmarks.policy_real TRACE.csv.gz --rehearse l4/qwen2.5-7b --policy capacity \\
        --json benchmarks/results/DATE-policy-rehearsed.json

Each policy runs on its own cluster (`mars-ray serve`), one after the other; nothing else may run meanwhile. A trace is
sped up so that its busiest part demands `--load` times the endpoint's capacity, measured at threshold 1 in a closed
loop. `--machine` writes the figures that the engines reported, for `python -m benchmarks.policy --machine`.
"""

import argparse
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_report
from benchmarks.served import URL, Sampler, closed_loop_rate, endpoint, policy_args, replicas, send
from mars_ray.adapter.card import decoding_card, resolve_adapter
from mars_ray.control.control_settings import ControlPlan
from mars_ray.data.prompt_file import read_prompts
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.stats.profile import ProfilePoint
from mars_ray.engine.stats.step_time import StepTime
from mars_ray.load.arrivals import TraceRow, read_trace
from mars_ray.load.plan import LoadPlan, bundled_prompts, closed_loop, conversations
from mars_ray.load.record import PlannedRequest, RequestOutcome, RequestRecord, RequestSlo, parse_slo
from mars_ray.load.summary import summarize
from mars_ray.model.card import CalibrationPoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.simulate.arrivals import Arrival, Arrivals
from mars_ray.simulate.machine import Machine, read_machine
from mars_ray.simulate.simulator import Simulation, SimulationOptions, simulate

POLICIES: dict[str, dict[str, Any]] = {
    "fixed 1.0": {"threshold": 1.0, "policy": "fixed"},
    "fixed 0.95": {"threshold": 0.95, "policy": "fixed"},
    "capacity": {"threshold": 1.0, "policy": "capacity"},
}
REPLICAS = 2
ROWS = 8
QUEUE = 64
FLOOR = 0.7
MAX_TOKENS = 64
SEED = 0


def main() -> None:
    """Run all policies on all traces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=600, help="length of the busiest part of the trace")
    parser.add_argument("--load", type=float, default=1.2, help="load as a multiple of the capacity at threshold 1")
    parser.add_argument("--capacity-requests", type=int, default=1000, help="requests to measure the capacity")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--adapter", help="name or folder")
    parser.add_argument("--prompts", type=Path, default=bundled_prompts(), help="prompts of the load")
    parser.add_argument("--machine", type=Path, help="file for the reports of the engines")
    parser.add_argument("--rehearse", help="machine whose step times the engines keep, such as l4/qwen2.5-7b")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="repeatable; all without it")
    parser.add_argument("--slo", default="ttft:1000,e2e:2000")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    slo = parse_slo(arguments.slo.split(","))
    assert slo is not None
    pool = read_prompts(arguments.prompts)
    model_args = {"model": arguments.model} | ({"adapter": arguments.adapter} if arguments.adapter else {})
    base = resolve_model(arguments.model)
    card = decoding_card(base, resolve_adapter(arguments.adapter))
    assert card is not None
    results = []
    for path in arguments.traces:
        rows = busiest(read_trace(path), arguments.seconds)
        capacity = None
        for name in arguments.policy or POLICIES:
            policy = POLICIES[name]
            with controlled(model_args, policy, slo, arguments.rehearse):
                # Of every policy, because it warms up the engines.
                rate = capacity_of(rows, pool, arguments.capacity_requests)
                capacity = capacity or rate
                speed = arguments.load * capacity / (len(rows) / arguments.seconds)
                front_s = front_seconds(pool)
                with Sampler() as sampler:
                    records = send(plan_of(rows, pool, speed))
                    reports = replicas()
            simulated_machine = machine_of(reports, card.calibration)
            if arguments.machine:
                arguments.machine.write_text(simulated_machine.model_dump_json(indent=1) + "\n")
            simulated = simulation(rows, speed, policy, slo, simulated_machine, front_s, records)
            results.append(
                result(path.name, name, speed, capacity, front_s, records, slo, simulated)
                | quality(sampler.seconds, simulated_machine)
                | {"replicas": reports}
            )
            show(results)
            write_report(arguments.json, {"slo": asdict(slo), "results": results})


def busiest(rows: list[TraceRow], seconds: float) -> list[TraceRow]:
    """Return the busiest part of `seconds` seconds, with times from 0."""
    times = [row.arrival_s for row in rows]
    last = 0
    best = (0, 0)
    for first, start_s in enumerate(times):
        while last < len(times) and times[last] < start_s + seconds:
            last += 1
        best = max(best, (last - first, -first))
    first = -best[1]
    return [replace(row, arrival_s=row.arrival_s - times[first]) for row in rows[first : first + best[0]]]


def controlled(
    model_args: dict[str, str], policy: dict[str, Any], slo: RequestSlo, rehearse: str | None
) -> AbstractContextManager[None]:
    """Return an endpoint with two engines under this policy."""
    engine = {"max_num_seqs": ROWS, "max_waiting_seqs": QUEUE} | ({"rehearse": rehearse} if rehearse else {})
    args = model_args | policy_args(policy, slo, FLOOR) | {"engine": engine}
    return endpoint(args, {"num_replicas": REPLICAS})


def quality(seconds: Sequence[tuple[float, float]], machine: Machine) -> dict[str, Any]:
    """Return the mean accuracy and agreement of the tokens, by the calibration at their thresholds."""
    total = sum(tokens for _, tokens in seconds)
    return {
        "real_quality": {
            name: sum(tokens * at(threshold) for threshold, tokens in seconds) / total
            for name, at in (("accuracy", machine.accuracy_at), ("agreement", machine.agreement_at))
        },
        "real_seconds": seconds,
    }


def plan_of(rows: list[TraceRow], pool: list[Any], speed: float) -> LoadPlan:
    """Return requests at the times of a trace, with prompts of the kind the model was trained on.

    A trace has lengths only. Random text of these lengths is unlike the training data, so few drafts would be right.
    """
    prompts = conversations(pool, random.Random(SEED))
    planned = [
        PlannedRequest(messages=messages, max_tokens=MAX_TOKENS, scheduled_s=row.arrival_s / speed)
        for row, messages in zip(rows, prompts, strict=False)
    ]
    return LoadPlan(iter(planned), len(planned))


def capacity_of(rows: list[TraceRow], pool: list[Any], count: int) -> float:
    """Return the answers per second at threshold 1 with all slots in use."""
    requests = [replace(request, scheduled_s=None) for request in plan_of(rows, pool, 1.0).requests][:count]
    return closed_loop_rate(requests[: count // 5], requests, 2 * REPLICAS * ROWS)


def front_seconds(pool: list[Any]) -> float:
    """Return half of the time that a single request spends outside the engine."""
    plan = closed_loop(pool, SEED, 30, 16)
    before = engine_seconds()
    records = send(plan, 1)
    inside_s = engine_seconds() - before
    return max(0.0, (sum(record.e2e_s for record in records) - inside_s) / len(records) / 2)


def engine_seconds() -> float:
    """Return the total seconds that requests have spent in the engines."""
    lines = httpx2.get(f"{URL}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:e2e_request_latency_seconds_sum"))


def simulation(
    rows: list[TraceRow],
    speed: float,
    policy: dict[str, Any],
    slo: RequestSlo,
    machine: Machine,
    front_s: float,
    records: list[RequestRecord],
) -> Simulation:
    """Simulate the same load, with the numbers of tokens that the engines counted."""
    prompts = [record.prompt_tokens for record in records if record.prompt_tokens]
    answers = [record.completion_tokens for record in records if record.completion_tokens]
    arrivals = [
        Arrival(
            row.arrival_s / speed,
            record.prompt_tokens or round(sum(prompts) / len(prompts)),
            record.completion_tokens or round(sum(answers) / len(answers)),
        )
        for row, record in zip(rows, records, strict=True)
    ]
    plan = ControlPlan.model_validate(
        {
            "ceiling": policy["threshold"],
            "classes": [{"floor": min(FLOOR, policy["threshold"])}],
            "settings": {"policy": policy["policy"], "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}},
            # The calibration limits the floor, as it does on the endpoint.
            "accuracy": machine.accuracy,
        }
    )
    options = SimulationOptions(replicas=REPLICAS, front_s=front_s, slo=slo, seed=SEED)
    return simulate(Arrivals(arrivals, mix=[1.0], seed=SEED), machine, plan, options)


def machine_of(reports: list[dict[str, Any]], calibrated: Sequence[CalibrationPoint]) -> Machine:
    """Return the mean of the reports as a machine; accuracy comes from calibration."""
    states = [report["state"] for report in reports]
    points = sorted(calibrated, key=lambda point: -point.threshold)
    agreement = {point.threshold: point.agreement for point in points}

    def mean(*columns: float) -> float:
        return sum(columns) / len(columns)

    return Machine(
        max_num_seqs=ROWS,
        max_waiting_seqs=QUEUE,
        max_prefill_tokens=EngineOptions().max_prefill_tokens,
        max_model_len=read_machine(None).max_model_len,
        step_time=StepTime(
            **{field.name: mean(*(state["step_time"][field.name] for state in states)) for field in fields(StepTime)}
        ),
        profile=tuple(
            ProfilePoint(
                threshold=same[0]["threshold"],
                tokens=tuple(map(mean, *(point["tokens"] for point in same))),
                positions=tuple(map(mean, *(point["positions"] for point in same))),
                agreement=agreement.get(same[0]["threshold"]),
            )
            for same in zip(*(state["profile"] for state in states), strict=True)
        ),
        # Where calibration had no tasks with verifiers, use agreement as accuracy.
        accuracy=tuple(
            (point.threshold, point.agreement if point.accuracy is None else point.accuracy) for point in points
        ),
    )


def result(
    trace: str,
    policy: str,
    speed: float,
    capacity: float,
    front_s: float,
    records: list[RequestRecord],
    slo: RequestSlo,
    simulated: Simulation,
) -> dict[str, Any]:
    """Return the metrics of one run and those of its simulation."""
    summary = summarize(records, slo)
    metrics = simulated.metrics
    assert summary.goodput is not None
    answered_records = [record for record in records if record.outcome is RequestOutcome.OK]
    return {
        "trace": trace,
        "policy": policy,
        "speed": speed,
        "capacity_requests_per_s": capacity,
        "front_ms": 1000 * front_s,
        "requests": summary.requests,
        "real": {
            "tokens_per_s": summary.output_tokens_per_s,
            "good": summary.goodput.fraction,
            "tokens_per_forward": summary.tokens_per_forward,
            "ttft_p50_ms": summary.latency_ms.ttft_arrival and summary.latency_ms.ttft_arrival.median,
            "tpot_p50_ms": summary.latency_ms.tpot and summary.latency_ms.tpot.median,
            "answered": len(answered_records),
        },
        "simulated": {
            "tokens_per_s": metrics.tokens_per_s,
            "good": metrics.good,
            "ttft_p50_ms": metrics.ttft_ms and metrics.ttft_ms.p50,
            "tpot_p50_ms": metrics.tpot_ms and metrics.tpot_ms.p50,
            "answered": metrics.ended,
            "threshold": metrics.threshold,
            "agreement": metrics.agreement,
            "accuracy": metrics.accuracy,
        },
    }


def show(results: list[dict[str, Any]]) -> None:
    """Print a table of the results so far."""
    columns = ("trace", "policy", "tokens/s", "SLO met", "TTFT p50 ms", "TPOT p50 ms", "answered", "accuracy")
    table = Table(*columns, title="real | simulated")
    for result in results:
        real = result["real"]
        simulated = result["simulated"]
        table.add_row(
            result["trace"],
            result["policy"],
            f"{real['tokens_per_s']:.0f} | {simulated['tokens_per_s']:.0f}",
            f"{real['good']:.3f} | {simulated['good']:.3f}",
            *(f"{real[name] or 0:.1f} | {simulated[name] or 0:.1f}" for name in ("ttft_p50_ms", "tpot_p50_ms")),
            f"{real['answered']} | {simulated['answered']}",
            f"{result['real_quality']['accuracy']:.4f} | {simulated['accuracy'] or 0:.4f}",
        )
    Console().print(table)


if __name__ == "__main__":
    run_program("benchmarks.policy_real", main)

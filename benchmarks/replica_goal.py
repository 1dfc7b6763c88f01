"""Compare replicas that follow the latency goal with replicas that follow demand alone, and with constant numbers.

    python -m benchmarks.replica_goal --json goal.json

Load changes in steps, bursts and waves between 0.8 and 2.8 times what one replica can serve. For each load the
simulator runs the controller with and without a promised time to first token, and each constant number of replicas.
"""

import argparse
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from benchmarks.report import command_line, write_report
from mars_ray.control.control_settings import ControlPlan
from mars_ray.errors import ConfigError
from mars_ray.load.record import RequestSlo
from mars_ray.measure import spread
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine
from mars_ray.simulate.arrivals import Arrival, Arrivals
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.modelled_machine import open_machine
from mars_ray.simulate.replicas import Scaling
from mars_ray.simulate.simulator import SimulationOptions, simulate

MOST = 12
"""Highest number of replicas."""
PEAK = 3.0
"""Load that no shape exceeds, in replicas."""
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 100
"""Mean lengths, exponentially distributed."""
DELAYS = {"upscale_delay_s": 10.0, "downscale_delay_s": 300.0}
"""Of `serve_configs/autoscaled.yaml`."""
KEPT = 0.95
"""Share of requests in time that keeps the promise."""
WARM_S = 1200
"""Seconds before the measurement, in which the goal learns."""
GOAL, DEMAND = "goal", "demand"
CONSTANTS = range(3, 7)

Load = Callable[[float], float]
"""Load in replicas at a second."""


def _step(second: float) -> float:
    return 0.8 if second < 1.5 * WARM_S else 2.6


def _bursts(period_s: float, second: float) -> float:
    return 2.6 if second % period_s < period_s / 2 else 1.0


def _wave(period_s: float, second: float) -> float:
    return 1.8 + math.sin(2 * math.pi * second / period_s)


LOADS: dict[str, Load] = {
    "step": _step,
    **{f"bursts of {period_s // 2} s": partial(_bursts, period_s) for period_s in (120, 480)},
    "waves of 10 min": partial(_wave, 600),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation. `replicas` is a constant number, or None with autoscaling."""

    load: str
    name: str
    replicas: int | None
    policy: str
    ttft_ms: float
    seconds: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a simulation after the first `WARM_S` seconds."""

    in_time: float
    replicas: float
    most_replicas: int
    changes_per_hour: float
    accuracy: float


def capacity(modelled: Machine) -> float:
    """Return the requests per second that one replica serves at threshold 1 when there are always more."""
    plan = ControlPlan.model_validate({"settings": {"policy": "fixed"}})
    arrivals = _arrivals(lambda _: PEAK, 1000.0 / PEAK, 60, 0)
    options = SimulationOptions(replicas=1, duration_s=60.0)
    seconds = simulate(Arrivals(arrivals), modelled, plan, options).seconds[10:60]
    return sum(second.ended for second in seconds) / len(seconds)


def _arrivals(load: Load, requests_s: float, seconds: int, seed: int) -> list[Arrival]:
    random, now_s, arrivals = Random(seed), 0.0, list[Arrival]()
    while (now_s := now_s + random.expovariate(PEAK * requests_s)) < seconds:
        if random.random() * PEAK < load(now_s):
            lengths = (1 + int(random.expovariate(1 / mean)) for mean in (PROMPT_TOKENS, OUTPUT_TOKENS))
            arrivals.append(Arrival(now_s, *lengths))
    return arrivals


def run(modelled: Machine, requests_s: float, asked: Run) -> Outcome:
    """Run one simulation."""
    slo = {} if asked.name == DEMAND else {"slo": {"ttft_ms": asked.ttft_ms}}
    plan = ControlPlan.model_validate({
        "settings": {"policy": asked.policy, **slo},
        "accuracy": modelled.accuracy,
        "agreement": modelled.agreement,
    })  # fmt: skip
    scaling = Scaling(min_replicas=1, max_replicas=MOST, **DELAYS) if asked.replicas is None else None
    options = SimulationOptions(
        replicas=asked.replicas or 2, scaling=scaling, slo=RequestSlo(ttft_ms=asked.ttft_ms), seed=asked.seed
    )
    arrivals = _arrivals(LOADS[asked.load], requests_s, asked.seconds, asked.seed)
    seconds = simulate(Arrivals(arrivals, seed=asked.seed), modelled, plan, options).seconds[WARM_S : asked.seconds]
    ended = [second for second in seconds if second.good is not None]
    counts = [second.ended + second.refused for second in ended]
    replicas = [second.replicas for second in seconds]
    answered = [second for second in seconds if second.accuracy is not None]
    return Outcome(
        in_time=sum(count * (second.good or 0) for count, second in zip(counts, ended, strict=True)) / sum(counts),
        replicas=sum(replicas) / len(replicas),
        most_replicas=max(replicas),
        changes_per_hour=3600 * sum(before != after for before, after in pairwise(replicas)) / len(replicas),
        accuracy=sum((second.accuracy or 0) * second.tokens for second in answered)
        / sum(second.tokens for second in answered),
    )


def compare(name: str, policy: str, ttft_ms: float, seconds: int, seeds: int) -> list[tuple[Run, Outcome]]:
    """Run all simulations. Raises `ConfigError`."""
    if seconds <= 1.5 * WARM_S:
        raise ConfigError(f"seconds is {seconds}; it must be more than {1.5 * WARM_S:g}.")
    modelled = open_machine(name)
    requests_s = capacity(modelled)
    shared = {"policy": policy, "ttft_ms": ttft_ms, "seconds": seconds}
    contenders = [(GOAL, None), (DEMAND, None), *((f"constant {number}", number) for number in CONSTANTS)]
    runs = [
        Run(load=load, name=contender, replicas=number, seed=seed, **shared)  # type: ignore[arg-type]
        for load in LOADS
        for contender, number in contenders
        for seed in range(seeds)
    ]
    outcomes = []
    with ProcessPoolExecutor() as pool, ProgressLine("simulations", total=len(runs)) as progress:
        for done, outcome in enumerate(pool.map(partial(run, modelled, requests_s), runs), start=1):
            outcomes.append(outcome)
            progress.update(done, {})
    return list(zip(runs, outcomes, strict=True))


def show(results: list[tuple[Run, Outcome]]) -> None:
    """Print medians over seeds with their ranges. Of the constants, the smallest that keeps the promise, and the next
    smaller one."""
    columns = ("load", "replicas", "in time, %", "mean replicas", "most", "changes per hour", "accuracy, %")
    table = Table(*columns, title=command_line())
    for load in LOADS:
        rows: dict[str, list[Outcome]] = {}
        for asked, outcome in results:
            if asked.load == load:
                rows.setdefault(asked.name, []).append(outcome)
        keeping = [name for name in rows if name not in (GOAL, DEMAND) and _mean_in_time(rows[name]) >= KEPT]
        best = int((keeping or [f"constant {CONSTANTS[-1]}"])[0].split()[-1])
        for name in (GOAL, DEMAND, f"constant {best - 1}", f"constant {best}"):
            if name in rows:
                table.add_row(load, name, *_cells(rows[name]))
        table.add_section()
    Console().print(table)


def _mean_in_time(outcomes: list[Outcome]) -> float:
    return sum(outcome.in_time for outcome in outcomes) / len(outcomes)


def _cells(outcomes: list[Outcome]) -> list[str]:
    cells = []
    for field, factor, digits in (
        ("in_time", 100, 1), ("replicas", 1, 2), ("most_replicas", 1, 0), ("changes_per_hour", 1, 1),
        ("accuracy", 100, 2),
    ):  # fmt: skip
        each = spread([factor * getattr(outcome, field) for outcome in outcomes])
        cells.append(f"{each.median:.{digits}f} ({each.min:.{digits}f}-{each.max:.{digits}f})")
    return cells


def main() -> None:
    """Simulate, print, and write every outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="l4/qwen2.5-7b", help="machine of `mars-ray simulate`")
    parser.add_argument("--policy", default="capacity", help="policy of thresholds")
    parser.add_argument("--ttft-ms", type=float, default=500.0, help="promised time to first token")
    parser.add_argument("--seconds", type=int, default=3 * WARM_S, help="simulated seconds")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for every outcome")
    options = parser.parse_args()
    results = compare(options.machine, options.policy, options.ttft_ms, options.seconds, options.seeds)
    show(results)
    write_report(options.json, {"runs": [asdict(asked) | asdict(outcome) for asked, outcome in results]})


if __name__ == "__main__":
    run_program("benchmarks.replica_goal", main)

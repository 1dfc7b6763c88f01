"""Compare all contenders on one trace, at several loads.

Loads are multiples of what threshold 1 meets the SLO at for 99 of 100 requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.policy.contenders import CONTENDERS
from benchmarks.policy.dominance import PolicyScore, dominated, mean_of
from benchmarks.policy.oracle import find_oracle
from benchmarks.policy.simulation_pool import ComparisonSetup, SimulationJob, SimulationPool
from benchmarks.policy.tables import LOADS, ORACLE, ORACLE_LOAD, OURS
from mars_ray.errors import ConfigError
from mars_ray.simulate.arrivals import Arrival
from mars_ray.simulate.simulator import Simulation

PARTS = 5
"""A trace is cut into so many parts; all figures are means over them."""
ATTAINED = 0.99
"""Share of the requests that must meet the SLO at the largest load."""
SEARCHED = ("fixed 1.0", "fixed 0.95", OURS)
"""Contenders whose largest load is searched, which takes many simulations."""
SEARCH_STEPS = 8
AUTOSCALED_LOAD = 1.2
BUSY_SHARE = 0.7
"""What is estimated to be full is taken for less: the first guess of a search should not be too high."""


def compare_on_trace(pool: SimulationPool, arrivals: tuple[Arrival, ...]) -> dict[str, Any]:
    """Compare all contenders on a trace; returns the report."""
    largest = _largest_speeds(pool, arrivals)
    capacity = largest["fixed 1.0"]
    parts = _parts(arrivals)
    kinds = [(load, name, number) for load in LOADS for name in CONTENDERS for number in range(PARTS)]
    jobs = [
        SimulationJob(contender=name, arrivals=parts[number], speed=load * capacity) for load, name, number in kinds
    ]
    results = dict(zip(kinds, pool.all(jobs), strict=True))
    load = ORACLE_LOAD
    for number, part in enumerate(parts):
        ours, full = results[load, OURS, number], results[load, "fixed 1.0", number]
        results[load, ORACLE, number] = find_oracle(pool, part, load * capacity, ours, full)
    by_load = {load: {name: _scores(results, load, name) for name in CONTENDERS} for load in LOADS}
    oracle = _scores(results, ORACLE_LOAD, ORACLE)
    scaled = pool.all(
        [
            SimulationJob(contender=each, arrivals=arrivals, speed=AUTOSCALED_LOAD * capacity, autoscale=True)
            for each in SEARCHED
        ]
    )
    return {
        "capacity_requests_per_s": capacity * len(arrivals) / max(arrivals[-1].arrival_s, 1e-9),
        "speed": capacity,
        "contenders": [*CONTENDERS, ORACLE],
        "largest_load": {name: speed / capacity for name, speed in largest.items()},
        "loads": {
            str(load): {name: asdict(mean_of(each)) for name, each in found.items()}
            | ({ORACLE: asdict(mean_of(oracle))} if load == ORACLE_LOAD else {})
            for load, found in by_load.items()
        },
        "dominated": {str(load): dominated(found) for load, found in by_load.items()},
        "quality_given_up_against_oracle": _given_up(by_load[ORACLE_LOAD], oracle),
        "autoscaled": {name: asdict(each.metrics) for name, each in zip(SEARCHED, scaled, strict=True)},
    }


def _parts(arrivals: tuple[Arrival, ...]) -> list[tuple[Arrival, ...]]:
    """Cut a trace into parts of equal length in time."""
    length_s = arrivals[-1].arrival_s / PARTS
    parts: list[list[Arrival]] = [[] for _ in range(PARTS)]
    for each in arrivals:
        number = min(int(each.arrival_s / length_s), PARTS - 1)
        parts[number].append(each._replace(arrival_s=each.arrival_s - number * length_s))
    if not all(parts):
        raise ConfigError(f"a fifth of the trace has no request; give one with some in each of its {PARTS} parts.")
    return [tuple(part) for part in parts]


def _scores(results: Mapping[tuple[float, str, int], Simulation], load: float, name: str) -> list[PolicyScore]:
    found = [results[load, name, number].metrics for number in range(PARTS)]
    return [PolicyScore(each.good or 0.0, each.accuracy or 0.0) for each in found]


def _given_up(found: Mapping[str, Sequence[PolicyScore]], oracle: Sequence[PolicyScore]) -> float | None:
    """Return how many times as many right answers ours loses as the oracle, all parts together."""
    full = [each.accuracy for each in found["fixed 1.0"]]
    ours, best = (
        sum(top - each.accuracy for top, each in zip(full, scores, strict=True)) for scores in (found[OURS], oracle)
    )
    return ours / best if best > 0 else None


def _largest_speeds(pool: SimulationPool, arrivals: tuple[Arrival, ...]) -> dict[str, float]:
    """Return for each the largest speed at which 99 of 100 requests meet the SLO, within 3 % or so."""
    low = dict.fromkeys(SEARCHED, 0.0)
    high = dict.fromkeys(SEARCHED, math.inf)
    tried = dict.fromkeys(SEARCHED, estimate_full_speed(pool.setup, arrivals))
    for _ in range(SEARCH_STEPS):
        jobs = [SimulationJob(contender=name, arrivals=arrivals, speed=tried[name]) for name in SEARCHED]
        for name, each in zip(SEARCHED, pool.all(jobs), strict=True):
            if (each.metrics.good or 0.0) >= ATTAINED:
                low[name] = tried[name]
            else:
                high[name] = tried[name]
            if low[name] == 0.0:
                tried[name] /= 2.5
            elif high[name] == math.inf:
                tried[name] *= 1.3
            else:
                tried[name] = math.sqrt(low[name] * high[name])
    return {name: speed or tried[name] for name, speed in low.items()}


def estimate_full_speed(setup: ComparisonSetup, arrivals: tuple[Arrival, ...]) -> float:
    """Return the speed at which all rows would be busy at threshold 1."""
    times, rows = setup.machine.step_time, setup.machine.max_num_seqs
    token_s = (times.fixed_s + rows * (times.seq_s + times.position_s)) / rows
    each_s = [
        times.prompt_s + each.prompt_tokens * times.prompt_token_s + each.output_tokens * token_s for each in arrivals
    ]
    return BUSY_SHARE * arrivals[-1].arrival_s * setup.replicas / sum(each_s)

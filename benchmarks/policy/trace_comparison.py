"""Compare all contenders on one trace at several loads, also with an oracle, which knows all arrivals.

Loads are multiples of the largest load at which threshold 1 meets the SLO for 99 of 100 requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median_high
from typing import Any

from benchmarks.policy.contenders import CONTENDERS
from benchmarks.policy.dominance import PolicyScore, dominated, mean_of
from benchmarks.policy.simulation_pool import FLOOR, WINDOW_S, ComparisonSetup, SimulationJob, SimulationPool
from benchmarks.policy.tables import LOADS, ORACLE, ORACLE_LOAD, OURS
from mars_ray.engine.stats.grid import GRID
from mars_ray.errors import ConfigError
from mars_ray.simulate.arrivals import Arrival
from mars_ray.simulate.simulator import Simulation

PARTS = 5
"""Number of parts of a trace, each with a seed of its own; all figures are means over the parts."""
ATTAINED = 0.99
"""Share of the requests that must meet the SLO at the largest load."""
SEARCHED = ("fixed 1.0", "fixed 0.95", OURS)
"""Contenders whose largest load is searched; only a few, because each takes many simulations."""
SEARCH_STEPS = 8
ORACLE_ROUNDS = 16
AUTOSCALED_LOAD = 1.2
BUSY_SHARE = 0.7
"""Share of the estimated full speed at which a search starts."""


def compare_on_trace(pool: SimulationPool, arrivals: tuple[Arrival, ...]) -> dict[str, Any]:
    """Compare all contenders on a trace and return the report."""
    largest = _largest_speeds(pool, arrivals)
    capacity = largest["fixed 1.0"]
    parts = _parts(arrivals)
    kinds = [(load, name, number) for load in LOADS for name in CONTENDERS for number in range(PARTS)]
    jobs = [
        SimulationJob(contender=name, arrivals=parts[number], speed=load * capacity, part=number)
        for load, name, number in kinds
    ]
    results = dict(zip(kinds, pool.all(jobs), strict=True))
    load = ORACLE_LOAD
    for number, part in enumerate(parts):
        ours = results[load, OURS, number]
        full = results[load, "fixed 1.0", number]
        results[load, ORACLE, number] = _oracle(pool, part, number, load * capacity, ours, full)
    by_load = {load: {name: _scores(results, load, name) for name in CONTENDERS} for load in LOADS}
    oracle = _scores(results, ORACLE_LOAD, ORACLE)
    scaled = pool.all(
        [
            SimulationJob(contender=name, arrivals=arrivals, speed=AUTOSCALED_LOAD * capacity, autoscale=True)
            for name in SEARCHED
        ]
    )
    return {
        "capacity_requests_per_s": capacity * len(arrivals) / max(arrivals[-1].arrival_s, 1e-9),
        "speed": capacity,
        "contenders": [*CONTENDERS, ORACLE],
        "largest_load": {name: speed / capacity for name, speed in largest.items()},
        "loads": {
            str(load): {name: asdict(mean_of(parts_of)) for name, parts_of in scores.items()}
            | ({ORACLE: asdict(mean_of(oracle))} if load == ORACLE_LOAD else {})
            for load, scores in by_load.items()
        },
        "dominated": {str(load): dominated(scores) for load, scores in by_load.items()},
        "quality_given_up_against_oracle": _given_up(by_load[ORACLE_LOAD], oracle),
        "autoscaled": {name: asdict(simulation.metrics) for name, simulation in zip(SEARCHED, scaled, strict=True)},
    }


def _oracle(
    pool: SimulationPool, arrivals: tuple[Arrival, ...], part: int, speed: float, ours: Simulation, best: Simulation
) -> Simulation:
    """Search for a schedule, window by window, that meets the SLO as often as our policy; return its simulation.

    All windows start at full quality. Thresholds fall by a step in each window that misses the SLO and in the window
    before it, until as many requests meet the SLO as with our policy.
    """
    grid = [threshold for threshold in GRID if threshold >= FLOOR]
    windows = int(len(best.seconds) / WINDOW_S) + 2
    steps = [0] * windows
    for _ in range(ORACLE_ROUNDS):
        if (best.metrics.good or 0.0) >= (ours.metrics.good or 0.0):
            break
        broken = _broken_windows(best, windows)
        if not any(broken) or all(steps[number] == len(grid) - 1 for number in range(windows) if broken[number]):
            break
        # Each round lowers the worse half of the broken windows, because that often repairs later windows too.
        worst = median_high(filter(None, broken))
        for number in [number for number, misses in enumerate(broken) if misses >= worst]:
            for window in range(max(0, number - 1), number + 1):
                steps[window] = min(steps[window] + 1, len(grid) - 1)
        schedule = tuple(grid[step] for step in steps)
        job = SimulationJob(contender=ORACLE, arrivals=arrivals, speed=speed, schedule=schedule, part=part)
        [best] = pool.all([job])
    return best


def _broken_windows(simulation: Simulation, windows: int) -> list[float]:
    """Return the number of requests in each window that missed the SLO."""
    broken = [0.0] * windows
    for second in simulation.seconds:
        if second.good is not None:
            requests = second.ended + second.refused
            broken[min(int(second.second / WINDOW_S), windows - 1)] += (1 - second.good) * requests
    return broken


def _parts(arrivals: tuple[Arrival, ...]) -> list[tuple[Arrival, ...]]:
    """Cut a trace into parts of equal length in time."""
    length_s = arrivals[-1].arrival_s / PARTS
    parts: list[list[Arrival]] = [[] for _ in range(PARTS)]
    for arrival in arrivals:
        number = min(int(arrival.arrival_s / length_s), PARTS - 1)
        parts[number].append(arrival._replace(arrival_s=arrival.arrival_s - number * length_s))
    if not all(parts):
        raise ConfigError(
            f"a part of the trace has no request; give a trace with requests in each of its {PARTS} parts."
        )
    return [tuple(part) for part in parts]


def _scores(results: Mapping[tuple[float, str, int], Simulation], load: float, name: str) -> list[PolicyScore]:
    metrics = [results[load, name, number].metrics for number in range(PARTS)]
    return [PolicyScore(part.good or 0.0, part.accuracy or 0.0) for part in metrics]


def _given_up(scores: Mapping[str, Sequence[PolicyScore]], oracle: Sequence[PolicyScore]) -> float | None:
    """Return the accuracy that our policy gives up as a multiple of what the oracle gives up."""
    full = [score.accuracy for score in scores["fixed 1.0"]]
    ours, best = (
        sum(top - score.accuracy for top, score in zip(full, of_contender, strict=True))
        for of_contender in (scores[OURS], oracle)
    )
    return ours / best if best > 0 else None


def _largest_speeds(pool: SimulationPool, arrivals: tuple[Arrival, ...]) -> dict[str, float]:
    """Return for each contender the largest speed at which 99 of 100 requests meet the SLO, within about 3 %."""
    low = dict.fromkeys(SEARCHED, 0.0)
    high = dict.fromkeys(SEARCHED, math.inf)
    speeds = dict.fromkeys(SEARCHED, estimate_full_speed(pool.setup, arrivals))
    for _ in range(SEARCH_STEPS):
        jobs = [SimulationJob(contender=name, arrivals=arrivals, speed=speeds[name]) for name in SEARCHED]
        for name, simulation in zip(SEARCHED, pool.all(jobs), strict=True):
            if (simulation.metrics.good or 0.0) >= ATTAINED:
                low[name] = speeds[name]
            else:
                high[name] = speeds[name]
            if low[name] == 0.0:
                speeds[name] /= 2.5
            elif high[name] == math.inf:
                speeds[name] *= 1.3
            else:
                speeds[name] = math.sqrt(low[name] * high[name])
    return {name: speed or speeds[name] for name, speed in low.items()}


def estimate_full_speed(setup: ComparisonSetup, arrivals: tuple[Arrival, ...]) -> float:
    """Return the speed at which most slots would be busy at threshold 1."""
    times = setup.machine.step_time
    slots = setup.machine.max_num_seqs
    token_s = (times.fixed_s + slots * (times.seq_s + times.position_s)) / slots
    request_s = [
        times.prompt_s + arrival.prompt_tokens * times.prompt_token_s + arrival.output_tokens * token_s
        for arrival in arrivals
    ]
    return BUSY_SHARE * arrivals[-1].arrival_s * setup.replicas / sum(request_s)

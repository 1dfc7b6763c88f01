"""`mars-ray bench policy`: policies on the same traces, on the same simulated cluster.

In:    traces, a machine, what was promised.
Out:   tables and one JSON report: who keeps the promise at which load, at what quality, how steadily.
Never: leaves a bad figure out. Loads are multiples of what threshold 1 keeps its promise at for 99 of 100 requests.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median_high
from typing import Any

from mars_ray.bench.load.arrivals import read_trace
from mars_ray.bench.load.slo import parse_slo
from mars_ray.bench.machine import machine as this_machine
from mars_ray.control.laws.policy import Law
from mars_ray.control.settings import ControlPlan
from mars_ray.engine.stats.lookahead import autoregressive
from mars_ray.engine.stats.profile import GRID
from mars_ray.errors import ConfigError
from mars_ray.progress import ProgressLine
from mars_ray.simulate.arrivals import Arrivals, Wish
from mars_ray.simulate.compare.baselines import batch_table, ema_hysteresis, scheduled
from mars_ray.simulate.compare.dominance import Outcome, dominated, mean_of
from mars_ray.simulate.compare.tables import BEST, LOADS, ORACLE_LOAD, OURS, show_steady, show_trace
from mars_ray.simulate.machine import Machine, read_machine
from mars_ray.simulate.record import Promise
from mars_ray.simulate.scaling import Scaling
from mars_ray.simulate.simulator import Simulation, SimulationOptions, simulate

PARTS = 5
"""A trace is cut into so many; figures are means over them."""
ATTAINED = 0.99
FLOOR = 0.7
WINDOW_S = 10.0
"""Of the oracle's schedule."""
SEARCHED = ("fixed 1.0", "fixed 0.95", OURS)
"""Whose largest load is searched, for the same reason."""
ORACLE_ROUNDS = 16
TICKS_PER_S = 20
SEARCH_STEPS = 8
STEADY_S, PEAK_S = 600.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Somebody who sets thresholds."""

    ceiling: float = 1.0
    law: Law | None = None
    recover_s: float | None = None
    """None is the controller's own; rivals have a smoothing of their own, or none."""
    policy: str = "fixed"
    ahead: bool = True
    """False decodes one token at a time."""


CONTENDERS: dict[str, Contender] = {
    "one token at a time": Contender(ahead=False),
    "fixed 1.0": Contender(),
    "fixed 0.99": Contender(ceiling=0.99),
    "fixed 0.98": Contender(ceiling=0.98),
    "fixed 0.95": Contender(ceiling=0.95),
    "fixed 0.9": Contender(ceiling=0.9),
    "fixed 0.8": Contender(ceiling=0.8),
    "fixed 0.7": Contender(ceiling=0.7),
    "batch table": Contender(law=batch_table, recover_s=0.0),
    "EMA, hysteresis": Contender(law=ema_hysteresis, recover_s=0.0),
    "load": Contender(policy="load"),
    "slo": Contender(policy="slo"),
    OURS: Contender(policy="capacity"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all have in common."""

    machine: Machine
    promise: Promise
    replicas: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Names are those of the command line."""

    traces: tuple[Path, ...]
    machine: Path | None = None
    replicas: int = 2
    rows: int = 16
    prompt_scale: float = 1 / 8
    output_scale: float = 1.0
    slo: tuple[str, ...] = ("ttft:1000,tpot:30",)
    seed: int = 0


def bench_policy(options: PolicyOptions) -> dict[str, Any]:
    """Compare and print; returns the report. Raises an `InputError`."""
    slo = parse_slo(options.slo)
    if slo is None:
        raise ConfigError("slo is empty; give what callers are promised, such as ttft:1000,tpot:30.")
    if not options.traces:
        raise ConfigError("there is no trace; give one or more Azure trace files.")
    machine = read_machine(options.machine).model_copy(update={"rows": options.rows, "queue": 256})
    setting = Setting(machine=machine, promise=Promise.of(slo), replicas=options.replicas, seed=options.seed)
    found: dict[str, Any] = {}
    with (
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
        ProgressLine("simulations", total=None) as progress,
    ):
        run = _Runner(pool, setting, progress)
        for path in options.traces:
            wishes = tuple(_wishes(path, options, machine))
            found[path.name] = _trace(run, wishes)
        steady = _steady(run)
    for name, report in found.items():
        show_trace(name, report)
    show_steady(steady)
    return {
        "command": "mars-ray bench policy " + " ".join(path.name for path in options.traces),
        "options": {key: value for key, value in asdict(options).items() if key not in ("traces", "machine")},
        "machine": this_machine(),
        "simulated_machine": machine.model_dump(exclude={"profile"}),
        "traces": found,
        "steady": steady,
    }


class _Runner:
    """Runs simulations side by side, and counts them."""

    def __init__(self, pool: ProcessPoolExecutor, setting: Setting, progress: ProgressLine) -> None:
        self._pool, self.setting, self._progress, self._done = pool, setting, progress, 0

    def all(self, jobs: Sequence["Job"]) -> list[Simulation]:
        """Return the results in order."""
        found = []
        for each in self._pool.map(partial(simulated, self.setting), jobs):
            self._done += 1
            self._progress.update(self._done, {})
            found.append(each)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulation. `speed` is how much faster than recorded the requests come."""

    contender: str
    wishes: tuple[Wish, ...]
    speed: float = 1.0
    schedule: tuple[float, ...] = ()
    """The oracle's; it takes the place of the law."""
    autoscale: bool = False


def simulated(setting: Setting, job: Job) -> Simulation:
    """Run one simulation."""
    contender = CONTENDERS.get(job.contender, Contender(recover_s=0.0))
    settings: dict[str, Any] = {
        "policy": contender.policy,
        "slo": {"ttft_ms": _ms(setting.promise.ttft_s), "tpot_ms": _ms(setting.promise.tpot_s)},
        # The floor alone limits all alike: what is compared is who stops by himself where nothing is left to win.
        "max_accuracy_loss": 1.0,
        "min_agreement": 0.0,
    }
    if contender.recover_s is not None:
        settings["recover_s"] = contender.recover_s
    plan = ControlPlan.model_validate(
        {
            "ceiling": contender.ceiling,
            "settings": settings,
            "classes": [{"floor": min(FLOOR, contender.ceiling)}],
            "accuracy": setting.machine.accuracy,
        }
    )
    scaling = None
    if job.autoscale:
        scaling = Scaling(min_replicas=setting.replicas, max_replicas=4 * setting.replicas)
    options = SimulationOptions(
        replicas=setting.replicas,
        ticks_per_s=TICKS_PER_S,
        promise=setting.promise,
        scaling=scaling,
        seed=setting.seed,
    )
    wishes = [each._replace(arrival_s=each.arrival_s / job.speed) for each in job.wishes]
    law = scheduled(job.schedule, WINDOW_S) if job.schedule else contender.law
    machine = setting.machine if contender.ahead else _plain(setting.machine)
    return simulate(Arrivals(wishes, seed=setting.seed), machine, plan, options, law=law)


def _plain(machine: Machine) -> Machine:
    """Return the machine with a threshold of 1 at which no draft is made."""
    first, *others = machine.profile
    plain = autoregressive(len(first.tokens))
    update = {"tokens": tuple(plain.tokens_B.tolist()), "positions": tuple(plain.positions_B.tolist())}
    return machine.model_copy(update={"profile": (first.model_copy(update=update), *others)})


def _trace(run: _Runner, wishes: tuple[Wish, ...]) -> dict[str, Any]:
    largest = _largest_speeds(run, wishes)
    capacity = largest["fixed 1.0"]
    parts = _parts(wishes)
    kinds = [(load, name, number) for load in LOADS for name in CONTENDERS for number in range(PARTS)]
    jobs = [Job(contender=name, wishes=parts[number], speed=load * capacity) for load, name, number in kinds]
    results = dict(zip(kinds, run.all(jobs), strict=True))
    load = ORACLE_LOAD
    for number, part in enumerate(parts):
        ours, full = results[load, OURS, number], results[load, "fixed 1.0", number]
        results[load, BEST, number] = _oracle(run, part, load * capacity, ours, full)
    by_load = {load: {name: _outcomes(results, load, name) for name in CONTENDERS} for load in LOADS}
    oracle = _outcomes(results, ORACLE_LOAD, BEST)
    scaled = run.all([Job(contender=each, wishes=wishes, speed=1.2 * capacity, autoscale=True) for each in SEARCHED])
    return {
        "capacity_requests_per_s": capacity * len(wishes) / max(wishes[-1].arrival_s, 1e-9),
        "speed": capacity,
        "contenders": [*CONTENDERS, BEST],
        "largest_load": {name: speed / capacity for name, speed in largest.items()},
        "loads": {
            str(load): {name: asdict(mean_of(each)) for name, each in found.items()}
            | ({BEST: asdict(mean_of(oracle))} if load == ORACLE_LOAD else {})
            for load, found in by_load.items()
        },
        "dominated": {str(load): dominated(found) for load, found in by_load.items()},
        "quality_given_up_against_oracle": _given_up(by_load[ORACLE_LOAD], oracle),
        "autoscaled": {name: asdict(each.figures) for name, each in zip(SEARCHED, scaled, strict=True)},
    }


def _parts(wishes: tuple[Wish, ...]) -> list[tuple[Wish, ...]]:
    """Cut a trace into parts of equal length in time."""
    length_s = wishes[-1].arrival_s / PARTS
    parts: list[list[Wish]] = [[] for _ in range(PARTS)]
    for each in wishes:
        number = min(int(each.arrival_s / length_s), PARTS - 1)
        parts[number].append(each._replace(arrival_s=each.arrival_s - number * length_s))
    if not all(parts):
        raise ConfigError(f"a fifth of the trace has no request; give one with some in each of its {PARTS} parts.")
    return [tuple(part) for part in parts]


def _outcomes(results: Mapping[tuple[float, str, int], Simulation], load: float, name: str) -> list[Outcome]:
    found = [results[load, name, number].figures for number in range(PARTS)]
    return [Outcome(each.good or 0.0, each.accuracy or 0.0) for each in found]


def _given_up(found: Mapping[str, Sequence[Outcome]], oracle: Sequence[Outcome]) -> float | None:
    """Return how many times as many right answers ours loses as the oracle, all parts together."""
    full = [each.accuracy for each in found["fixed 1.0"]]
    ours, best = (
        sum(top - each.accuracy for top, each in zip(full, outcomes, strict=True)) for outcomes in (found[OURS], oracle)
    )
    return ours / best if best > 0 else None


def _largest_speeds(run: _Runner, wishes: tuple[Wish, ...]) -> dict[str, float]:
    """Return for each the largest speed at which 99 of 100 requests get what was promised, within 3 % or so."""
    low = dict.fromkeys(SEARCHED, 0.0)
    high = dict.fromkeys(SEARCHED, math.inf)
    tried = dict.fromkeys(SEARCHED, _guess(run.setting, wishes))
    for _ in range(SEARCH_STEPS):
        jobs = [Job(contender=name, wishes=wishes, speed=tried[name]) for name in SEARCHED]
        for name, each in zip(SEARCHED, run.all(jobs), strict=True):
            if (each.figures.good or 0.0) >= ATTAINED:
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


def _guess(setting: Setting, wishes: tuple[Wish, ...]) -> float:
    """Return the speed at which all rows would be busy at threshold 1."""
    times, rows = setting.machine.step_time, setting.machine.rows
    token_s = (times.fixed_s + rows * (times.row_s + times.position_s)) / rows
    each_s = [
        times.prompt_s + wish.prompt_tokens * times.prompt_token_s + wish.output_tokens * token_s for wish in wishes
    ]
    return 0.7 * wishes[-1].arrival_s * setting.replicas / sum(each_s)


def _oracle(run: _Runner, wishes: tuple[Wish, ...], speed: float, ours: Simulation, best: Simulation) -> Simulation:
    """Return what thresholds window by window would have done for somebody who knew everything beforehand.

    Beginning with full quality everywhere, thresholds fall by a step in the windows where promises were broken and in
    those before them that left a queue, until as many are kept as by ours.
    """
    grid = [threshold for threshold in GRID if threshold >= FLOOR]
    windows = int(len(best.seconds) / WINDOW_S) + 2
    steps = [0] * windows
    for _ in range(ORACLE_ROUNDS):
        if (best.figures.good or 0.0) >= (ours.figures.good or 0.0):
            break
        broken = _broken_windows(best, windows)
        if not any(broken) or all(steps[each] == len(grid) - 1 for each in range(windows) if broken[each]):
            break
        # Half of the broken windows each round, the worst first: mending one often mends those behind it.
        worst = median_high(filter(None, broken))
        for each in [number for number, misses in enumerate(broken) if misses >= worst]:
            for place in range(max(0, each - 1), each + 1):
                steps[place] = min(steps[place] + 1, len(grid) - 1)
        schedule = tuple(grid[step] for step in steps)
        [best] = run.all([Job(contender=BEST, wishes=wishes, speed=speed, schedule=schedule)])
    return best


def _broken_windows(found: Simulation, windows: int) -> list[float]:
    broken = [0.0] * windows
    for second in found.seconds:
        if second.good is not None:
            done = second.ended + second.refused
            broken[min(int(second.second / WINDOW_S), windows - 1)] += (1 - second.good) * done
    return broken


def _steady(run: _Runner) -> dict[str, Any]:
    """Return changes a minute under steady load, and the time back to full quality after a peak."""
    setting, found = run.setting, {}
    sizes = (120, 120)
    rate = _guess(setting, tuple(Wish(float(n), *sizes) for n in range(100))) / 0.7
    shapes = {
        "steady 0.6": [(STEADY_S, 0.6)],
        "steady 0.9": [(STEADY_S, 0.9)],
        "peak": [(200.0, 0.5), (PEAK_S, 1.15), (300.0, 0.4)],
    }
    names = [name for name, each in CONTENDERS.items() if each.law or each.policy != "fixed"]
    jobs = [
        Job(contender=name, wishes=tuple(_poisson(shape, rate, sizes, setting.seed)))
        for name in names
        for shape in shapes.values()
    ]
    results = dict(zip([(name, shape) for name in names for shape in shapes], run.all(jobs), strict=True))
    for name in names:
        peak = results[name, "peak"]
        after = [each for each in peak.seconds if each.second > 200 + PEAK_S and each.threshold is not None]
        low = [each.second for each in after if (each.threshold or 0.0) < 1.0 - 1e-9]
        found[name] = {
            "changes_per_minute": {
                shape: results[name, shape].figures.threshold_changes_per_minute for shape in shapes if shape != "peak"
            },
            "back_at_full_quality_s": (max(low) - 200 - PEAK_S) if low else 0.0,
            "good_in_peak": peak.figures.good,
        }
    return found


def _poisson(shape: Sequence[tuple[float, float]], rate: float, sizes: tuple[int, int], seed: int) -> Iterator[Wish]:
    source, begin_s = random.Random(seed), 0.0
    for seconds, load in shape:
        now_s = begin_s
        while (now_s := now_s + source.expovariate(rate * load)) < begin_s + seconds:
            yield Wish(now_s, *sizes)
        begin_s += seconds


def _wishes(path: Path, options: PolicyOptions, machine: Machine) -> Iterator[Wish]:
    """Yield the requests of a trace as this model takes them: what is longer than its context is cut."""
    for row in read_trace(path):
        prompt = max(1, math.floor(row.context_tokens * options.prompt_scale + 0.5))
        output = max(1, math.floor(row.generated_tokens * options.output_scale + 0.5))
        output = min(output, machine.positions - 1)
        yield Wish(row.arrival_s, min(prompt, machine.positions - output), output)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds

"""Run policies on the same traces and simulated cluster; compare SLO attainment, quality and steadiness by load."""

import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

from benchmarks.policy.simulation_pool import ComparisonSetup, SimulationPool
from benchmarks.policy.steadiness import compare_steadiness
from benchmarks.policy.tables import show_steady, show_trace
from benchmarks.policy.trace_comparison import compare_on_trace
from mars_ray.errors import ConfigError
from mars_ray.load.arrivals import read_trace
from mars_ray.load.record import parse_slo
from mars_ray.progress import ProgressLine
from mars_ray.simulate.arrivals import Arrival
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.modelled_machine import open_machine
from mars_ray.storage.location import AnyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Options of the command line."""

    traces: tuple[AnyPath, ...]
    machine: str | None = None
    replicas: int = 2
    rows: int = 16
    prompt_scale: float = 1 / 8
    output_scale: float = 1.0
    slo: tuple[str, ...] = ("ttft:1000,tpot:30",)
    seed: int = 0


def compare_policies(options: PolicyOptions) -> dict[str, Any]:
    """Compare, print, and return the figures. Raises an `InputError`."""
    slo = parse_slo(options.slo)
    if slo is None:
        raise ConfigError("slo is empty; give the SLO, such as ttft:1000,tpot:30.")
    if not options.traces:
        raise ConfigError("no trace is named; give one or more Azure trace files.")
    machine = open_machine(options.machine).model_copy(update={"max_num_seqs": options.rows, "max_waiting_seqs": 256})
    setup = ComparisonSetup(machine=machine, slo=slo, replicas=options.replicas, seed=options.seed)
    reports: dict[str, Any] = {}
    with (
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
        ProgressLine("simulations", total=None) as progress,
    ):
        simulations = SimulationPool(pool, setup, progress)
        for path in options.traces:
            arrivals = tuple(_arrivals(path, options, machine))
            reports[path.name] = compare_on_trace(simulations, arrivals)
        steady = compare_steadiness(simulations)
    for name, report in reports.items():
        show_trace(name, report)
    show_steady(steady)
    return {
        "options": {key: value for key, value in asdict(options).items() if key not in ("traces", "machine")},
        "simulated_machine": machine.model_dump(exclude={"profile"}),
        "traces": reports,
        "steady": steady,
    }


def _arrivals(path: AnyPath, options: PolicyOptions, machine: Machine) -> Iterator[Arrival]:
    """Yield the requests of a trace, shortened to the context of the model."""
    for row in read_trace(path):
        prompt = max(1, math.floor(row.context_tokens * options.prompt_scale + 0.5))
        output = max(1, math.floor(row.generated_tokens * options.output_scale + 0.5))
        output = min(output, machine.max_model_len - 1)
        yield Arrival(row.arrival_s, min(prompt, machine.max_model_len - output), output)

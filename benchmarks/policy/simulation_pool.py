"""Run the simulations of a comparison in several processes."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.policy.alternative_policies import scheduled
from benchmarks.policy.contenders import CONTENDERS, Contender
from mars_ray.control.control_settings import ControlPlan
from mars_ray.load.record import RequestSlo
from mars_ray.progress import ProgressLine
from mars_ray.simulate.arrivals import Arrival, Arrivals
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.replicas import Scaling
from mars_ray.simulate.simulator import Simulation, SimulationOptions, simulate

FLOOR = 0.7
"""Lowest threshold that any contender may use."""
WINDOW_S = 10.0
"""Length of a window of the oracle's schedule."""
TICKS_PER_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSetup:
    """Settings that all simulations of a comparison share."""

    machine: Machine
    slo: RequestSlo
    replicas: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationJob:
    """One simulation to run, with the arrivals sped up by `speed`."""

    contender: str
    arrivals: tuple[Arrival, ...]
    speed: float = 1.0
    schedule: tuple[float, ...] = ()
    """Schedule of the oracle, which replaces the policy."""
    autoscale: bool = False
    part: int = 0
    """Number of the part of a trace, added to the seed of the setup: each part has its own draws."""


class SimulationPool:
    """Runs simulations in parallel and shows how many are done."""

    def __init__(self, pool: ProcessPoolExecutor, setup: ComparisonSetup, progress: ProgressLine) -> None:
        self._pool = pool
        self.setup = setup
        self._progress = progress
        self._done = 0

    def all(self, jobs: Sequence[SimulationJob]) -> list[Simulation]:
        """Return the results in the order of the jobs."""
        results = []
        for simulation in self._pool.map(partial(run_job, self.setup), jobs):
            self._done += 1
            self._progress.update(self._done, {})
            results.append(simulation)
        return results


def run_job(setup: ComparisonSetup, job: SimulationJob) -> Simulation:
    """Run one simulation."""
    contender = CONTENDERS.get(job.contender, Contender(recover_s=0.0))
    settings: dict[str, Any] = {
        "policy": contender.policy,
        "slo": {"ttft_ms": setup.slo.ttft_ms, "tpot_ms": setup.slo.tpot_ms},
        # Only the floor limits the contenders, so the comparison shows which of them stop lowering by themselves.
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
            "accuracy": setup.machine.accuracy,
        }
    )
    scaling = None
    if job.autoscale:
        scaling = Scaling(min_replicas=setup.replicas, max_replicas=4 * setup.replicas)
    options = SimulationOptions(
        replicas=setup.replicas,
        ticks_per_s=TICKS_PER_S,
        slo=setup.slo,
        scaling=scaling,
        seed=setup.seed + job.part,
    )
    arrivals = [arrival._replace(arrival_s=arrival.arrival_s / job.speed) for arrival in job.arrivals]
    alternative = scheduled(job.schedule, WINDOW_S) if job.schedule else contender.alternative
    machine = setup.machine if contender.ahead else setup.machine.without_lookahead()
    return simulate(Arrivals(arrivals, seed=setup.seed + job.part), machine, plan, options, policy=alternative)

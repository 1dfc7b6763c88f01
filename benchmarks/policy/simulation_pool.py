"""Run the simulations of a comparison, several at a time in processes of their own."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.policy.alternative_policies import scheduled
from benchmarks.policy.contenders import CONTENDERS, Contender
from mars_ray.control.settings import ControlPlan
from mars_ray.engine.stats.lookahead import autoregressive
from mars_ray.progress import ProgressLine
from mars_ray.simulate.arrivals import Arrival, Arrivals
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.metrics import SloSeconds
from mars_ray.simulate.scaling import Scaling
from mars_ray.simulate.simulator import Simulation, SimulationOptions, simulate

FLOOR = 0.7
"""The least threshold of all contenders."""
WINDOW_S = 10.0
"""Length of a window of the oracle's schedule."""
TICKS_PER_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSetup:
    """What all simulations of a comparison have in common."""

    machine: Machine
    slo: SloSeconds
    replicas: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationJob:
    """One simulation to run. `speed` is how much faster than recorded the requests come."""

    contender: str
    arrivals: tuple[Arrival, ...]
    speed: float = 1.0
    schedule: tuple[float, ...] = ()
    """The oracle's schedule; it takes the place of the policy."""
    autoscale: bool = False


class SimulationPool:
    """Runs simulations side by side, and counts them."""

    def __init__(self, pool: ProcessPoolExecutor, setup: ComparisonSetup, progress: ProgressLine) -> None:
        self._pool, self.setup, self._progress, self._done = pool, setup, progress, 0

    def all(self, jobs: Sequence[SimulationJob]) -> list[Simulation]:
        """Return the results in order."""
        found = []
        for each in self._pool.map(partial(simulated, self.setup), jobs):
            self._done += 1
            self._progress.update(self._done, {})
            found.append(each)
        return found


def simulated(setup: ComparisonSetup, job: SimulationJob) -> Simulation:
    """Run one simulation."""
    contender = CONTENDERS.get(job.contender, Contender(recover_s=0.0))
    settings: dict[str, Any] = {
        "policy": contender.policy,
        "slo": {"ttft_ms": _ms(setup.slo.ttft_s), "tpot_ms": _ms(setup.slo.tpot_s)},
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
        seed=setup.seed,
    )
    arrivals = [each._replace(arrival_s=each.arrival_s / job.speed) for each in job.arrivals]
    alternative = scheduled(job.schedule, WINDOW_S) if job.schedule else contender.alternative
    machine = setup.machine if contender.ahead else _plain(setup.machine)
    return simulate(Arrivals(arrivals, seed=setup.seed), machine, plan, options, policy=alternative)


def _plain(machine: Machine) -> Machine:
    """Return the machine with a threshold of 1 at which no draft is made."""
    first, *others = machine.profile
    plain = autoregressive(len(first.tokens))
    update = {"tokens": tuple(plain.tokens_B.tolist()), "positions": tuple(plain.positions_B.tolist())}
    return machine.model_copy(update={"profile": (first.model_copy(update=update), *others)})


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds

"""A cluster that is not there: arrivals through router, queues and engines, with the controller that a real one has.

Nothing is decided here: thresholds and replicas come from `Controller`. The same seed gives the same result.

Open in this order: `arrivals` → `router` → `queues` → `fleet` (with `prefill` and `threshold_curves`) →
`reports` → the controller → `scaling`; `recorder` sums up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mars_ray.control.core.controller import Controller
from mars_ray.control.policies.policy import Policy
from mars_ray.control.settings import ControlPlan
from mars_ray.errors import ConfigError
from mars_ray.simulate.arrivals import Arrivals
from mars_ray.simulate.fleet import Fleet
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.metrics import SecondMetrics, SimulationMetrics, SloSeconds
from mars_ray.simulate.queues import Floats, Ints
from mars_ray.simulate.recorder import SimulationRecorder
from mars_ray.simulate.reports import Reports
from mars_ray.simulate.router import route
from mars_ray.simulate.scaling import Replicas, Scaling

REPORTING = 16
"""Replicas that report. In a larger cluster the controller sees so many of them, and the rest follow the cluster's
thresholds: a thousand reports a second take longer to make and to read than a second."""
DRAIN_S = 600.0
"""Seconds after the last arrival in which what runs may end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """The settings of one simulation."""

    replicas: int
    ticks_per_s: int | None = None
    """None: 200 for up to 16 replicas, 50 for up to 100, else 10."""
    scaling: Scaling | None = None
    """How the number of replicas follows demand; None keeps it."""
    front_s: float = 0.0
    """Seconds that lie before the engine, and once more behind it."""
    slo: SloSeconds | None = None
    duration_s: float | None = None
    """Seconds after which nothing arrives any more; None takes all arrivals."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}; it must be at least 1.")
        if self.ticks_per_s is not None and not 1 <= self.ticks_per_s <= 100_000:
            raise ConfigError(f"ticks_per_s is {self.ticks_per_s}; it must be in 1..100000.")
        if not 0 <= self.front_s < 60:
            raise ConfigError(f"front_s is {self.front_s}; it must be from 0 to 60.")
        if self.duration_s is not None and not self.duration_s > 0:
            raise ConfigError(f"duration is {self.duration_s}; it must be above 0.")
        if self.scaling and not self.scaling.min_replicas <= self.replicas <= self.scaling.max_replicas:
            raise ConfigError(
                f"replicas is {self.replicas}; to begin with it must be in "
                f"{self.scaling.min_replicas}..{self.scaling.max_replicas}."
            )

    @property
    def ticks(self) -> int:
        """Ticks in a second."""
        return self.ticks_per_s or (200 if self.replicas <= 16 else 50 if self.replicas <= 100 else 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What one simulation gave."""

    metrics: SimulationMetrics
    seconds: tuple[SecondMetrics, ...]
    reporting: int
    """Number of replicas that reported."""


def simulate(
    arrivals: Arrivals,
    machine: Machine,
    plan: ControlPlan,
    options: SimulationOptions,
    each_second: Callable[[SecondMetrics], None] = lambda _: None,
    *,
    policy: Policy[Any] | None = None,
) -> Simulation:
    """Run until all requests ended. `policy` takes the place of the policy of `plan`."""
    return _Cluster(arrivals, machine, plan, options, policy).run(each_second)


class _Cluster:
    def __init__(
        self,
        arrivals: Arrivals,
        machine: Machine,
        plan: ControlPlan,
        options: SimulationOptions,
        policy: Policy[Any] | None,
    ) -> None:
        self._arrivals, self._machine, self._options, self._plan = arrivals, machine, options, plan
        most = options.scaling.max_replicas if options.scaling else options.replicas
        self._reporting = min(most, REPORTING)
        self._fleet = Fleet(machine, plan.classes, most, plan.ceiling, self._reporting)
        self._reports = Reports(self._fleet, machine, plan.classes, self._reporting)
        self._replicas = Replicas(options.replicas, options.scaling)
        self._recorder = SimulationRecorder(machine, options.slo, options.front_s)
        self._random = np.random.default_rng([options.seed, 2])
        self._now_s = 0.0
        self._controller = Controller(plan, policy=policy, clock=lambda: self._now_s, unix_clock=lambda: self._now_s)
        self._desired = options.replicas
        self._changes = self._replica_s = 0.0

    def run(self, each_second: Callable[[SecondMetrics], None]) -> Simulation:
        """Run until all ended, or until it is clear that they will not."""
        last_s = self._arrivals.last_s
        if self._options.duration_s is not None:
            last_s = min(last_s, self._options.duration_s)
        number = 0
        while number <= last_s or (self._fleet.in_flight_N.any() and number < last_s + DRAIN_S):
            number += 1
            self._second(number, last_s)
            each_second(self._recorder.seconds[-1])
        minutes = max(self._replica_s, 1e-9) / 60
        metrics = self._recorder.metrics(
            in_flight=int(self._fleet.in_flight_N.sum()),
            changes_per_minute=self._changes / minutes,
            replica_minutes=self._replica_s / 60,
        )
        return Simulation(metrics=metrics, seconds=tuple(self._recorder.seconds), reporting=self._reporting)

    def _second(self, number: int, last_s: float) -> None:
        fleet, ticks = self._fleet, self._options.ticks
        front_s = self._options.front_s
        came = self._arrivals.until(min(max(number - front_s, 0.0), np.nextafter(last_s, np.inf)))
        at_s, begin = came.arrival_s + front_s, 0
        for tick in range(ticks):
            begin_s, end_s = number - 1 + tick / ticks, number - 1 + (tick + 1) / ticks
            until = int(np.searchsorted(at_s, end_s)) if tick < ticks - 1 else len(at_s)
            if until > begin:
                part = slice(begin, until)
                self._arrive(at_s[part], came.prompt[part], came.output[part], came.service_class[part])
            begin = until
            if fleet.in_flight_N.any():
                self._recorder.ended(fleet.advance(begin_s, end_s))
        self._now_s = float(number)
        self._replica_s += self._replicas.count
        self._reports.second()
        self._recorder.second(
            number,
            fleet.tokens_NC,
            fleet.thresholds_NC,
            running=int(fleet.held_NC.sum()),
            waiting=int(fleet.queues.waiting.sum()),
            replicas=len(self._replicas.up),
            desired=self._desired,
        )
        self._control(number)
        self._replicas.follow(self._desired, fleet.in_flight_N, self._now_s)

    def _arrive(self, at_s: Floats, prompt: Floats, output: Floats, of_class: Ints) -> None:
        """Route what reaches the engines in a tick."""
        fits: NDArray[np.bool_] = prompt + output <= self._machine.max_model_len
        too_long = len(fits) - int(fits.sum())
        if too_long:
            at_s, prompt, output, of_class = at_s[fits], prompt[fits], output[fits], of_class[fits]
        replica = route(self._fleet.in_flight_N, self._replicas.up, len(at_s), self._random)
        placed = self._fleet.add(replica, of_class, at_s, prompt, output)
        self._recorder.came(len(fits), len(placed) - int(placed.sum()), too_long)

    def _control(self, number: int) -> None:
        """Let replicas report, and follow the answers."""
        fleet, names = self._fleet, [each.name for each in self._plan.classes]
        thresholds_NC = fleet.thresholds_NC.copy()
        reporting = [replica for replica in self._replicas.up.tolist() if replica < self._reporting]
        for replica in reporting:
            directive = self._controller.handle_report(self._reports.of(replica, number))
            thresholds_NC[replica] = [directive.thresholds[name] for name in names]
            self._desired = directive.desired_replicas
        if reporting:
            if self._replicas.up[-1] >= self._reporting:
                said = self._controller.thresholds()
                thresholds_NC[self._reporting :] = [said[name] for name in names]
            self._desired = -(-self._desired * len(self._replicas.up) // len(reporting))
        there = self._replicas.up
        self._changes += float((thresholds_NC[there] != fleet.thresholds_NC[there]).mean(axis=1).sum())
        fleet.set_thresholds(thresholds_NC)

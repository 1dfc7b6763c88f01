"""Simulate a cluster: requests pass a router, queues and engines; the real `Controller` sets thresholds and replicas.

The same seed gives the same result. Data flows in this order: `arrivals` → `Queues` of a `fleet` → `Reports` of
`replicas` → the controller → `Replicas`. `SimulationRecorder` of `metrics` records the figures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.controller import Controller
from mars_ray.control.policies.policy import Policy
from mars_ray.errors import ConfigError
from mars_ray.load.record import RequestSlo
from mars_ray.simulate.arrivals import Arrivals
from mars_ray.simulate.fleet import Floats, Ints
from mars_ray.simulate.fluid_fleet import FluidFleet
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.metrics import SecondMetrics, SimulationMetrics, SimulationRecorder
from mars_ray.simulate.replicas import Replicas, Reports, Scaling
from mars_ray.simulate.stepped_fleet import SteppedFleet

REPORTING = 16
"""Maximum number of replicas that report. In a larger cluster, the others follow the thresholds of the cluster, because
it takes longer than a second to make and read a thousand reports."""
STEPPED = 16
"""Largest number of replicas that are simulated step by step. More replicas would take too long."""
SLACK = 4
"""Number of requests that a preferred replica may have more than the least loaded one, as in `prefix_routing`."""
AT_ONCE = 0.5
"""Requests per replica that are routed before the counts of requests in flight are updated."""
DRAIN_S = 600.0
"""Maximum seconds after the last arrival for which unfinished requests are still simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Settings of one simulation."""

    replicas: int
    ticks_per_s: int | None = None
    """Ticks per second. None means 200 for up to 16 replicas, 50 for up to 100, and 10 for more."""
    scaling: Scaling | None = None
    """Autoscaling; None keeps the number of replicas."""
    front_s: float = 0.0
    """Seconds of latency added before the engine, and again after it."""
    slo: RequestSlo | None = None
    duration_s: float | None = None
    """Seconds after which arrivals are ignored; None keeps all arrivals."""
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
                f"replicas is {self.replicas}; at the start it must be in "
                f"{self.scaling.min_replicas}..{self.scaling.max_replicas}."
            )

    @property
    def ticks(self) -> int:
        """Number of ticks per second."""
        return self.ticks_per_s or (200 if self.replicas <= 16 else 50 if self.replicas <= 100 else 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Result of a simulation."""

    metrics: SimulationMetrics
    seconds: tuple[SecondMetrics, ...]
    reporting: int
    """Number of replicas that reported."""


def simulate(
    arrivals: Arrivals,
    machine: Machine,
    plan: ControlPlan,
    options: SimulationOptions,
    on_second: Callable[[SecondMetrics], None] = lambda _: None,
    *,
    policy: Policy[Any] | None = None,
) -> Simulation:
    """Run a simulation until all requests have ended. `policy` replaces the policy of `plan`."""
    return _Cluster(arrivals, machine, plan, options, policy).run(on_second)


class _Cluster:
    def __init__(
        self,
        arrivals: Arrivals,
        machine: Machine,
        plan: ControlPlan,
        options: SimulationOptions,
        policy: Policy[Any] | None,
    ) -> None:
        self._arrivals = arrivals
        self._machine = machine
        self._options = options
        self._plan = plan
        most = options.scaling.max_replicas if options.scaling else options.replicas
        self._reporting = min(most, REPORTING)
        self._fleet = (
            SteppedFleet(machine, plan.classes, most, plan.ceiling, self._reporting, options.seed)
            if most <= STEPPED
            else FluidFleet(machine, plan.classes, most, plan.ceiling, self._reporting)
        )
        self._reports = Reports(self._fleet, machine, plan.classes, self._reporting)
        self._replicas = Replicas(options.replicas, options.scaling)
        self._recorder = SimulationRecorder(machine, options.slo, options.front_s)
        self._random = np.random.default_rng([options.seed, 2])
        self._now_s = 0.0
        self._controller = Controller(plan, policy=policy, clock=lambda: self._now_s, unix_clock=lambda: self._now_s)
        self._desired = options.replicas
        self._changes = self._replica_s = 0.0

    def run(self, on_second: Callable[[SecondMetrics], None]) -> Simulation:
        """Run until all requests have ended, but no longer than `DRAIN_S` seconds after the last arrival."""
        last_s = self._arrivals.last_s
        if self._options.duration_s is not None:
            last_s = min(last_s, self._options.duration_s)
        number = 0
        # Requests reach the engines `front_s` after their arrival.
        while number <= last_s + self._options.front_s or (self._fleet.in_flight_N.any() and number < last_s + DRAIN_S):
            number += 1
            self._second(number, last_s)
            on_second(self._recorder.seconds[-1])
        minutes = max(self._replica_s, 1e-9) / 60
        metrics = self._recorder.metrics(
            in_flight=int(self._fleet.in_flight_N.sum()),
            changes_per_minute=self._changes / minutes,
            replica_minutes=self._replica_s / 60,
        )
        return Simulation(metrics=metrics, seconds=tuple(self._recorder.seconds), reporting=self._reporting)

    def _second(self, number: int, last_s: float) -> None:
        fleet = self._fleet
        ticks = self._options.ticks
        front_s = self._options.front_s
        batch = self._arrivals.until(min(max(number - front_s, 0.0), np.nextafter(last_s, np.inf)))
        at_s = batch.arrival_s + front_s
        begin = 0
        for tick in range(ticks):
            begin_s = number - 1 + tick / ticks
            end_s = number - 1 + (tick + 1) / ticks
            until = int(np.searchsorted(at_s, end_s)) if tick < ticks - 1 else len(at_s)
            if until > begin:
                part = slice(begin, until)
                self._arrive(at_s[part], batch.prompt[part], batch.output[part], batch.service_class[part])
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
        """Route and queue the requests that reach the engines in a tick."""
        fits: NDArray[np.bool_] = prompt + output <= self._machine.max_model_len
        too_long = len(fits) - int(fits.sum())
        if too_long:
            at_s = at_s[fits]
            prompt = prompt[fits]
            output = output[fits]
            of_class = of_class[fits]
        replica = route(self._fleet.in_flight_N, self._replicas.up, len(at_s), self._random)
        queued = self._fleet.add(replica, of_class, at_s, prompt, output)
        self._recorder.arrived(len(fits), len(queued) - int(queued.sum()), too_long)

    def _control(self, number: int) -> None:
        """Send the reports of the replicas to the controller and follow its directives."""
        fleet = self._fleet
        names = [service_class.name for service_class in self._plan.classes]
        thresholds_NC = fleet.thresholds_NC.copy()
        reporting = [replica for replica in self._replicas.up.tolist() if replica < self._reporting]
        for replica in reporting:
            directive = self._controller.handle_report(self._reports.of(replica, number))
            thresholds_NC[replica] = [directive.thresholds[name] for name in names]
            self._desired = directive.desired_replicas
        if reporting:
            if self._replicas.up[-1] >= self._reporting:
                thresholds = self._controller.thresholds()
                thresholds_NC[self._reporting :] = [thresholds[name] for name in names]
            self._desired = -(-self._desired * len(self._replicas.up) // len(reporting))
        up = self._replicas.up
        self._changes += float((thresholds_NC[up] != fleet.thresholds_NC[up]).mean(axis=1).sum())
        fleet.set_thresholds(thresholds_NC)


def route(in_flight: Ints, up: Ints, requests: int, random: np.random.Generator) -> Ints:
    """Choose one of the replicas `up` for each request, and count the requests in `in_flight`.

    The rules are those of `serve/replicas/prefix_routing`. A request prefers the replica that holds its prefix, here a
    random one. It goes to the least loaded replica instead if the preferred one has more than `SLACK` additional
    requests.
    """
    preferred = up[random.integers(len(up), size=requests)]
    chosen = preferred.copy()
    size = max(1, int(AT_ONCE * len(up)))
    for start in range(0, requests, size):
        part = slice(start, start + size)
        loads = in_flight[up]
        busy = np.flatnonzero(in_flight[preferred[part]] > loads.min() + SLACK)
        if len(busy):
            # Each request takes one of the least loaded replicas. Ties are broken at random, whereas the real router
            # breaks them with a hash.
            drawn = loads + random.random(len(up))
            least = np.argpartition(drawn, min(len(busy), len(up)) - 1)[: len(busy)]
            chosen[start + busy] = up[least[np.arange(len(busy)) % len(least)]]
        np.add.at(in_flight, chosen[part], 1)
    return chosen

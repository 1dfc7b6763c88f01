"""Find the number of replicas that a trace needs, and the load that these replicas can bear, for each way of decoding.

Every figure comes from simulating the busiest part of the trace with the real controller.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mars_ray.control.control_settings import ControlPlan
from mars_ray.errors import EmptyDataError
from mars_ray.load.record import RequestSlo
from mars_ray.simulate.arrivals import Arrival, Arrivals
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.metrics import SecondMetrics, SimulationMetrics
from mars_ray.simulate.simulator import SimulationOptions, simulate

ATTAINED = 0.99
"""Share of requests that must meet the SLO."""
MAX_PLANNED_REPLICAS = 1024
TICKS_PER_S = 20
LOAD_STEP = 1.5
"""Factor by which the load grows from one trial to the next until the replicas miss the SLO."""
LOAD_HALVINGS = 3
"""Number of bisections between the highest load that met the SLO and the lowest load that missed it."""
LOAD_MAX = 64.0
"""Largest multiple of the trace's load that is tried."""
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingChoice:
    """A way of decoding: one token at a time, exact, a constant threshold, or a threshold that follows the load."""

    name: str
    machine: Machine
    plan: ControlPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """The load to plan for, and the latency to meet."""

    arrivals: tuple[Arrival, ...]
    seconds: float
    """Length of this part of the trace."""
    slo: RequestSlo
    dollars_per_hour: float
    """Price of one replica."""
    seed: int = 0

    @property
    def output_tokens(self) -> float:
        """Total tokens in all answers."""
        return sum(arrival.output_tokens for arrival in self.arrivals)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """The result for one way of decoding; figures are None if no number of replicas meets the SLO."""

    decoding: str
    replicas: int | None = None
    """Smallest number of replicas with which 99 of 100 requests meet the SLO."""
    dollars_per_million_tokens: float | None = None
    """Price of a million answer tokens at the trace's load."""
    accuracy: float | None = None
    agreement: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p99_ms: float | None = None
    requests_per_s: float | None = None
    """Largest load at which these replicas meet the SLO."""


class _GaveIn(Exception):
    """Raised to end a simulation in which too many requests have missed the SLO."""


def decoding_choices(machine: Machine, plan: ControlPlan) -> list[DecodingChoice]:
    """Return all ways of decoding. Only the choice `capacity` keeps the floors and the calibrated limits of `plan`."""
    choices = [
        DecodingChoice(name="one token at a time", machine=machine.without_lookahead(), plan=_constant(plan, 1.0))
    ]
    for threshold, _ in machine.accuracy:
        name = "exact" if threshold == 1 else f"threshold {threshold:g}"
        choices.append(DecodingChoice(name=name, machine=machine, plan=_constant(plan, threshold)))
    settings = plan.settings.model_copy(update={"policy": "capacity"})
    capacity = plan.model_copy(update={"settings": settings})
    return [*choices, DecodingChoice(name="capacity", machine=machine, plan=capacity)]


def busiest_part(arrivals: Sequence[Arrival], seconds: float) -> tuple[Arrival, ...]:
    """Return the requests in the busiest period of length `seconds`, measured by tokens. Their times start at 0."""
    if not arrivals:
        raise EmptyDataError("The trace has no requests; give one with at least one request.")
    tokens = [0.0, *accumulate(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals)]
    times = [arrival.arrival_s for arrival in arrivals]
    ends = [bisect_left(times, start_s + seconds) for start_s in times]
    first = max(range(len(arrivals)), key=lambda number: tokens[ends[number]] - tokens[number])
    return tuple(
        arrival._replace(arrival_s=arrival.arrival_s - times[first]) for arrival in arrivals[first : ends[first]]
    )


def plan_row(load: PlannedLoad, choice: DecodingChoice) -> PlanRow:
    """Find the number of replicas and the largest load for one way of decoding."""
    replicas, metrics = _fewest_replicas(load, choice)
    if metrics is None:
        return PlanRow(decoding=choice.name)
    hours = load.seconds / HOUR_S
    return PlanRow(
        decoding=choice.name,
        replicas=replicas,
        dollars_per_million_tokens=1e6 * replicas * load.dollars_per_hour * hours / load.output_tokens,
        accuracy=metrics.accuracy,
        agreement=metrics.agreement,
        ttft_p99_ms=metrics.ttft_ms.p99 if metrics.ttft_ms else None,
        tpot_p99_ms=metrics.tpot_ms.p99 if metrics.tpot_ms else None,
        requests_per_s=_largest_load(load, choice, replicas) * len(load.arrivals) / load.seconds,
    )


def _constant(plan: ControlPlan, threshold: float) -> ControlPlan:
    """Return a plan that keeps all classes at one threshold, regardless of the calibrated quality at this threshold."""
    settings = plan.settings.model_copy(update={"policy": "fixed", "max_accuracy_loss": 1.0, "min_agreement": 0.0})
    classes = tuple(service_class.model_copy(update={"floor": threshold}) for service_class in plan.classes)
    return plan.model_copy(update={"settings": settings, "ceiling": threshold, "classes": classes})


def _fewest_replicas(load: PlannedLoad, choice: DecodingChoice) -> tuple[int, SimulationMetrics | None]:
    """Return the smallest number of replicas that meets the SLO, and the metrics of its simulation. The metrics are
    None if no number of replicas meets the SLO."""
    if _metrics(_of_one_request(load), choice, 1) is None:
        return 0, None
    enough = 1
    while (metrics := _metrics(load, choice, enough)) is None:
        enough *= 2
        if enough > MAX_PLANNED_REPLICAS:
            return 0, None
    few = enough // 2
    while enough - few > 1:
        middle = (few + enough) // 2
        fewer = _metrics(load, choice, middle)
        if fewer is None:
            few = middle
        else:
            enough = middle
            metrics = fewer
    return enough, metrics


def _of_one_request(load: PlannedLoad) -> PlannedLoad:
    """Return a load that is only the request with the shortest prompt. If even this request misses the SLO, no number
    of replicas helps."""
    shortest = min(load.arrivals, key=lambda arrival: arrival.prompt_tokens)
    return replace(load, arrivals=(shortest._replace(arrival_s=0.0),))


def _largest_load(load: PlannedLoad, choice: DecodingChoice, replicas: int) -> float:
    """Return the largest multiple of the trace's load at which the replicas meet the SLO, accurate to about 5 %."""
    met = 1.0
    missed = LOAD_STEP
    while missed < LOAD_MAX and _metrics(load, choice, replicas, missed) is not None:
        met = missed
        missed *= LOAD_STEP
    for _ in range(LOAD_HALVINGS):
        middle = math.sqrt(met * missed)
        if _metrics(load, choice, replicas, middle) is None:
            missed = middle
        else:
            met = middle
    return met


def _metrics(
    load: PlannedLoad, choice: DecodingChoice, replicas: int, multiple: float = 1.0
) -> SimulationMetrics | None:
    """Simulate a multiple of the load and return the metrics, or None if the SLO is missed."""
    arrivals = [arrival._replace(arrival_s=arrival.arrival_s / multiple) for arrival in load.arrivals]
    left = (1 - ATTAINED) * len(arrivals)

    def count_misses(second: SecondMetrics) -> None:
        nonlocal left
        if second.good is not None:
            left -= (1 - second.good) * (second.ended + second.refused)
        if left < -1e-6:
            raise _GaveIn

    options = SimulationOptions(replicas=replicas, ticks_per_s=TICKS_PER_S, slo=load.slo, seed=load.seed)
    mix = [1.0] * len(choice.plan.classes)
    try:
        result = simulate(
            Arrivals(arrivals, mix=mix, seed=load.seed), choice.machine, choice.plan, options, count_misses
        )
    except _GaveIn:
        return None
    return result.metrics if (result.metrics.good or 0.0) >= ATTAINED - 1e-9 and not result.metrics.in_flight else None

"""The policy `capacity`: the highest thresholds at which the replicas keep up, judged by their measured speed.

A PI controller on the measured latency covers what the prediction by speed misses. Only thresholds whose gain in
requests finished in time is worth their loss of right answers are used; the operator's exchange rate
`in_time_per_accuracy` compares the two.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import NormalDist

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.policy import Bounds, Decision, Policy

IN_TIME_PER_CAPACITY = 2.0
"""Gain in percentage points of requests finished in time per percent of added capacity, while capacity is short.
Simulations show 9 to 13 around full load, where queues build up and drain, and 1 to 6 in lasting overload."""
SPREAD = 0.15
"""Standard deviation of the logarithm of the load from second to second."""
LEAST_ODDS = 0.002
EVEN = 0.5
"""Probability of a capacity shortage above which a step to a lower threshold is taken: `LEAST_ODDS` for the cheapest
steps, `EVEN` for the most expensive ones and those of unknown cost."""
LEAST_GAIN = 0.002
"""Minimum relative gain in capacity for a lower threshold to be used."""
MARGIN = 0.8
"""Share of the promised latency to aim for, so that the slowest requests keep the promise too."""
GAIN = 0.3
GAIN_PER_S = 0.05
"""Proportional gain and integral gain: the share of the way from ceiling to floor by which thresholds fall if latency
is 100 % above the promise."""
RELIEF = 4
"""How many times faster the integral falls than it rises. The smoother still keeps thresholds down for long enough."""


def aimed_tpot_s(plan: ControlPlan) -> float | None:
    """Return the seconds per token to aim for; None if no time per token was promised."""
    promised_ms = plan.settings.slo.tpot_ms
    return None if promised_ms is None else MARGIN * promised_ms / 1000


def worst_latency(plan: ControlPlan, load: ClusterLoad) -> tuple[float, str]:
    """Return the ratio of measured to promised latency, and that latency's name; if two are promised, the worse one."""
    promised = plan.settings.slo
    shares = [
        (measured_s * 1000 / promised_ms, name)
        for measured_s, promised_ms, name in (
            (load.ttft_p95_s, promised.ttft_ms, "time to first token"),
            (load.tpot_p95_s, promised.tpot_ms, "time per token"),
        )
        if measured_s is not None and promised_ms is not None
    ]
    return max(shares, default=(0.0, "latency (none promised or measured)"))


def worthwhile_bounds(plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds]) -> Mapping[str, Bounds]:
    """Return the bounds limited to worthwhile choices; unchanged until the speed is known."""
    if load.speed is None:
        return bounds
    return {name: replace(bound, levels=worthwhile(plan, load, name, bound.choices)) for name, bound in bounds.items()}


def worthwhile(plan: ControlPlan, load: ClusterLoad, name: str, choices: Sequence[float]) -> tuple[float, ...]:
    """Return those of `choices`, highest first, whose gain for a class exceeds their cost while capacity is short.

    Choices below the lowest calibrated threshold are left out.
    """
    kept = [choices[0]]
    calibrated = [threshold for threshold, _ in plan.accuracy or plan.agreement]
    lowest = min(calibrated) if len(calibrated) > 1 else 0.0
    for choice in choices[1:]:
        if choice >= lowest and _price(plan, load, name, kept[-1], choice) < 1:
            kept.append(choice)
    return tuple(kept)


def room_above(plan: ControlPlan, load: ClusterLoad, name: str, high: float, low: float) -> float:
    """Return the share of a replica's time that a class at threshold `high` may take before `low` pays off.

    Load varies, so a share that is below 1 on average is sometimes above 1. A cheap step pays off even if that is rare,
    an expensive one only if it happens half of the time. Steps are taken early only if the measured latency is close to
    the promised one, because capacity is not short while latency is far below the promise.
    """
    near = min(worst_latency(plan, load)[0] / MARGIN, 1.0)
    calibrated = bool(plan.accuracy or plan.agreement)
    odds = min(max(_price(plan, load, name, high, low), LEAST_ODDS), EVEN) if calibrated else EVEN
    return (1 - plan.settings.headroom) * math.exp(near * SPREAD * NormalDist().inv_cdf(odds))


def _price(plan: ControlPlan, load: ClusterLoad, name: str, high: float, low: float) -> float:
    """Return the share of the time for which capacity must be short at `high` for `low` to pay off.

    A result of 1 or more means that `low` never pays off. Capacity means the requests per second that can be served
    within the promised time per token, including the reading of prompts. Each point of calibrated accuracy lost must
    bring `in_time_per_accuracy` more points of requests finished in time. If no answers could be verified, agreement
    stands in for accuracy.
    """
    tpot_s = aimed_tpot_s(plan)
    gain = load.request_seconds(name, high, tpot_s) / load.request_seconds(name, low, tpot_s) - 1
    if gain <= LEAST_GAIN:
        return math.inf
    cost = plan.settings.in_time_per_accuracy * (plan.quality(high) - plan.quality(low))
    return cost / (IN_TIME_PER_CAPACITY * gain)


@dataclass(frozen=True, slots=True)
class LatencyState:
    """State of the PI controller."""

    integral: float = 0.0
    """Integrated error, from 0 to 1, as a share of the way from ceiling to floor."""


def decide_by_capacity(
    plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], state: LatencyState, dt_s: float
) -> tuple[dict[str, Decision], LatencyState]:
    """Take the highest thresholds at which replicas of the measured speed meet the demand and the promised latency.

    Thresholds whose loss of accuracy outweighs their gain in requests finished in time are excluded, however high the
    load is. Where the measured latency asks for a lower threshold than the prediction, that one is used.
    """
    bounds = worthwhile_bounds(plan, load, bounds)
    by_latency, state = _follow_latency(plan, load, bounds, state, dt_s)
    decisions = dict[str, Decision]()
    for priority in sorted({service_class.priority for service_class in plan.classes}, reverse=True):
        peers = [service_class for service_class in plan.classes if service_class.priority == priority]
        shares = {peer.name: peer.share for peer in peers}
        if load.speed is None:
            decisions |= {name: Decision(bounds[name].ceiling, "no speed measured yet") for name in shares}
        else:
            decisions |= _fit_priority(plan, load, {name: bounds[name] for name in shares}, shares, decisions)
    by_threshold = attrgetter("threshold")
    return {name: min(decision, by_latency[name], key=by_threshold) for name, decision in decisions.items()}, state


CAPACITY = Policy(decide_by_capacity, initial=LatencyState())


def _follow_latency(
    plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], state: LatencyState, dt_s: float
) -> tuple[dict[str, Decision], LatencyState]:
    """Lower thresholds until the measured latency meets the promise; `bounds` contain only worthwhile thresholds."""
    worst, latency_name = worst_latency(plan, load)
    error = worst / MARGIN - 1
    # The integral is clipped, because it must not take minutes to recover from a long peak.
    gain = GAIN_PER_S * (1 if error > 0 else RELIEF)
    integral = min(max(state.integral + gain * error * dt_s, 0.0), 1.0)
    part = min(max(integral + GAIN * error, 0.0), 1.0)
    reason = f"{latency_name} is {worst:.0%} of what was promised"
    loads = _fair_loads(plan, {demand.name: demand.running + demand.waiting for demand in load.classes})
    heaviest = max(loads.values(), default=0.0)
    decisions = {
        # A class that uses less than its share pays for the load of others with latency, never with quality.
        name: Decision(bounds[name].at(part if own >= heaviest else 0.0), reason)
        for name, own in loads.items()
    }
    return decisions, LatencyState(integral)


def _fair_loads(plan: ControlPlan, requests: Mapping[str, float]) -> dict[str, float]:
    """Return, for each class, the load if all classes of its priority used as much as it does relative to their shares.

    The result is at most the real load. Classes of lower priority do not count.
    """
    loads = {}
    for own in plan.classes:
        peers = [peer for peer in plan.classes if peer.priority == own.priority]
        higher = [service_class for service_class in plan.classes if service_class.priority > own.priority]
        above = sum(requests.get(service_class.name, 0.0) for service_class in higher)
        alike = requests.get(own.name, 0.0) * sum(peer.share for peer in peers) / own.share
        loads[own.name] = above + min(alike, sum(requests.get(peer.name, 0.0) for peer in peers))
    return loads


def _fit_priority(
    plan: ControlPlan,
    load: ClusterLoad,
    bounds: Mapping[str, Bounds],
    shares: Mapping[str, float],
    above: Mapping[str, Decision],
) -> dict[str, Decision]:
    """Return the highest thresholds at which the classes of one priority fit next to classes of higher priority.

    All thresholds fall together. A class with little demand relative to its share stops falling first.
    """
    tpot_s = aimed_tpot_s(plan)
    fitted = dict[str, Decision]()
    used = sum(load.share_with_queue(name, decision.threshold, tpot_s) for name, decision in above.items())
    levels = sorted({choice for bound in bounds.values() for choice in bound.choices}, reverse=True)
    for level in levels:
        trial = {name: min(choice for choice in bound.choices if choice >= level) for name, bound in bounds.items()}
        trial |= {name: decision.threshold for name, decision in fitted.items()}
        needed = {name: load.share_with_queue(name, threshold, tpot_s) for name, threshold in trial.items()}
        total = used + sum(needed.values())
        for name in [name for name in bounds if name not in fitted]:
            room = load.replicas * _room(plan, load, name, bounds[name], trial[name])
            # What the load would be if every class used the replicas as heavily as this one does, relative to its
            # share.
            alike = used + needed[name] * sum(shares.values()) / shares[name]
            # The threshold of a class below its share stops falling early; classes with equal loads per share fall
            # together.
            modest = alike <= room and alike < total * (1 - 1e-9)
            if total <= room or modest or level == levels[-1]:
                judged = min(total, alike) / load.replicas
                fitted[name] = Decision(trial[name], f"demand is {judged:.0%} of the capacity at {trial[name]:g}")
    return fitted


def _room(plan: ControlPlan, load: ClusterLoad, name: str, bounds: Bounds, threshold: float) -> float:
    """Return the share of a replica's time that a class may take before the next lower threshold is worth its cost."""
    lower = [choice for choice in bounds.choices if choice < threshold]
    return room_above(plan, load, name, threshold, lower[0]) if lower else 1 - plan.settings.headroom

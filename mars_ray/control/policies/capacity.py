"""The policy `capacity`: the highest thresholds at which the replicas keep up, judged by their measured speed.

A PI controller on the measured latency covers what the prediction by speed misses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.bounds import Bounds
from mars_ray.control.policies.policy import Decision, Policy
from mars_ray.control.policies.worth import MARGIN, aimed_tpot_s, room_above, worst_latency, worthwhile_bounds

GAIN = 0.3
GAIN_PER_S = 0.05
"""Proportional gain and integral gain: the share of the way from ceiling to floor by which thresholds fall if latency
is 100 % above the promise."""
RELIEF = 4
"""How many times faster the integral falls than it rises. The smoother still keeps thresholds down for long enough."""


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

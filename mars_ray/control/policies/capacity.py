"""The policy `capacity`: the highest thresholds at which the replicas keep up, by their measured speed."""

from collections.abc import Mapping

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.bounds import Bounds
from mars_ray.control.policies.feedback import SloState, follow_latency
from mars_ray.control.policies.policy import Decision, Policy, threshold_of
from mars_ray.control.policies.worth import aimed_tpot_s, room_above, worthwhile_bounds


def decide_by_capacity(
    plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], state: SloState, dt_s: float
) -> tuple[dict[str, Decision], SloState]:
    """Take the highest thresholds at which the replicas keep up, and keep their promise, by their measured speed.

    Thresholds that cost more accuracy than they bring requests in time are left out, however high the load is. What the
    prediction does not see, the latency that is measured does: where the policy `slo` is lower, it wins.
    """
    bounds = worthwhile_bounds(plan, load, bounds)
    by_latency, state = follow_latency(plan, load, bounds, state, dt_s)
    decisions = dict[str, Decision]()
    for priority in sorted({each.priority for each in plan.classes}, reverse=True):
        shares = {each.name: each.share for each in plan.classes if each.priority == priority}
        if load.speed is None:
            decisions |= {name: Decision(bounds[name].ceiling, "no speed measured yet") for name in shares}
        else:
            decisions |= _fit_priority(plan, load, {name: bounds[name] for name in shares}, shares, decisions)
    return {name: min(each, by_latency[name], key=threshold_of) for name, each in decisions.items()}, state


CAPACITY = Policy(decide_by_capacity, initial=SloState())


def _fit_priority(
    plan: ControlPlan,
    load: ClusterLoad,
    bounds: Mapping[str, Bounds],
    shares: Mapping[str, float],
    above: Mapping[str, Decision],
) -> dict[str, Decision]:
    """Return the highest thresholds at which the classes of one priority fit next to those of higher priority.

    All thresholds fall together; a class that demands little for its share stops first.
    """
    tpot_s = aimed_tpot_s(plan)
    found = dict[str, Decision]()
    used = sum(load.share_with_queue(name, decision.threshold, tpot_s) for name, decision in above.items())
    levels = sorted({choice for each in bounds.values() for choice in each.choices}, reverse=True)
    for level in levels:
        trial = {name: min(c for c in each.choices if c >= level) for name, each in bounds.items()}
        trial |= {name: decision.threshold for name, decision in found.items()}
        needed = {name: load.share_with_queue(name, threshold, tpot_s) for name, threshold in trial.items()}
        total = used + sum(needed.values())
        for name in [each for each in bounds if each not in found]:
            room = load.replicas * _room(plan, load, name, bounds[name], trial[name])
            # The load there would be if all used the replicas as this class does.
            alike = used + needed[name] * sum(shares.values()) / shares[name]
            fits, modest = total <= room, alike <= room and alike < total * (1 - 1e-9)  # equal ones pay together
            if fits or modest or level == levels[-1]:
                judged = min(total, alike) / load.replicas
                found[name] = Decision(trial[name], f"{judged:.0%} of the capacity at {trial[name]:g} is asked for")
    return found


def _room(plan: ControlPlan, load: ClusterLoad, name: str, bounds: Bounds, threshold: float) -> float:
    """Return the share of the time that a class may take before the next lower threshold is worth its cost."""
    lower = [choice for choice in bounds.choices if choice < threshold]
    return room_above(plan, load, name, threshold, lower[0]) if lower else 1 - plan.settings.headroom

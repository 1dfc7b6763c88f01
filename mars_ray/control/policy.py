"""The laws: from load to thresholds, as pure functions.

In:    load, bounds of each class, the settings, what the law remembered.
Out:   an aim and its reason for each class; what to remember.
Never: reads a clock, smooths (see `smoother`), answers outside the bounds.

Lowering a threshold costs quality and no compute, so it goes down with load: laws of speculative decoding, which draft
less under load to save compute, have the other sign. The block, which does cost compute, is the engine's own to choose.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mars_ray.control.limits import Bounds
from mars_ray.control.load import Load
from mars_ray.control.settings import ControlPlan, PolicyName

Memory = Mapping[str, float]

OCCUPANCY_LOW, OCCUPANCY_HIGH = 0.5, 1.5
"""`load`: requests per row from which a threshold falls, and at which it is at its floor."""

GAIN, GAIN_PER_S = 0.3, 0.05
"""`slo`: of the way from ceiling to floor, per 100 % that the latency is above what was promised."""
MARGIN = 0.9
"""Of what was promised: aimed at, so that the tail keeps it too."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Where a threshold should be."""

    threshold: float
    reason: str


Law = Callable[[ControlPlan, Load, Mapping[str, Bounds], Memory, float], tuple[dict[str, Aim], Memory]]
"""(plan, load, bounds by class, memory, seconds since the last call) -> (aims by class, memory)."""


def fixed(
    _plan: ControlPlan, _load: Load, bounds: Mapping[str, Bounds], memory: Memory, _dt_s: float
) -> tuple[dict[str, Aim], Memory]:
    """Leave every threshold at its ceiling."""
    return {name: Aim(each.ceiling, "fixed") for name, each in bounds.items()}, memory


def load(
    plan: ControlPlan, now: Load, bounds: Mapping[str, Bounds], memory: Memory, _dt_s: float
) -> tuple[dict[str, Aim], Memory]:
    """Lower thresholds in proportion to how many requests there are for each row."""
    asked = {each.name: (each.running + each.waiting) / max(1, now.rows) for each in now.classes}
    aims = {}
    for name, occupancy in _views(plan, asked).items():
        part = (occupancy - OCCUPANCY_LOW) / (OCCUPANCY_HIGH - OCCUPANCY_LOW)
        aims[name] = Aim(_way_down(bounds[name], part), f"{occupancy:.2f} requests for each row")
    return aims, memory


def slo(
    plan: ControlPlan, now: Load, bounds: Mapping[str, Bounds], memory: Memory, dt_s: float
) -> tuple[dict[str, Aim], Memory]:
    """Lower thresholds until the latency that is measured is the one that was promised (PI control)."""
    promised = plan.settings.slo
    measured = [
        (found_s * 1000 / limit_ms, what)
        for found_s, limit_ms, what in (
            (now.ttft_p95_s, promised.ttft_ms, "time to first token"),
            (now.itl_p95_s, promised.tpot_ms, "time per token"),
        )
        if found_s is not None and limit_ms is not None
    ]
    worst, what = max(measured, default=(0.0, "nothing promised or measured, latency"))
    error = worst / MARGIN - 1
    # The sum stays between the bounds of what it controls: it must not take minutes to come back from a long peak.
    summed = min(max(memory.get("sum", 0.0) + GAIN_PER_S * error * dt_s, 0.0), 1.0)
    part = min(max(summed + GAIN * error, 0.0), 1.0)
    reason = f"{what} is {worst:.0%} of what was promised"
    asked = {each.name: each.running + each.waiting for each in now.classes}
    heaviest = max(_views(plan, asked).values(), default=0.0)
    aims = {
        # A class that asks for less than its share pays for the load of others in latency, never in quality.
        name: Aim(_way_down(bounds[name], part if view >= heaviest else 0.0), reason)
        for name, view in _views(plan, asked).items()
    }
    return aims, {"sum": summed}


def capacity(
    plan: ControlPlan, now: Load, bounds: Mapping[str, Bounds], memory: Memory, _dt_s: float
) -> tuple[dict[str, Aim], Memory]:
    """Take the highest thresholds at which the replicas keep up, and keep their promise, by their measured speed."""
    if now.speed is None:
        return {name: Aim(each.ceiling, "no speed measured yet") for name, each in bounds.items()}, memory
    room, aims = now.replicas * (1 - plan.settings.headroom), {}
    chosen = {name: each.ceiling for name, each in bounds.items()}
    shares = {each.name: each.share for each in plan.classes}
    priorities = {each.name: each.priority for each in plan.classes}
    full = {name: now.now(name, chosen[name]) for name in bounds}
    # From the lightest for its share to the heaviest: who asks for little keeps quality, who asks for most pays.
    for name in sorted(bounds, key=lambda name: (-priorities[name], full[name] / shares[name])):
        rivals = [each for each in bounds if priorities[each] >= priorities[name]]
        heavier = [each for each in rivals if full[each] / shares[each] >= full[name] / shares[name]]
        share = shares[name] / sum(shares[each] for each in rivals if priorities[each] == priorities[name])
        for threshold in bounds[name].choices:
            trial = chosen | {each: max(threshold, bounds[each].floor) for each in heavier}
            total = sum(now.now(each, trial[each]) for each in rivals)
            # Judged by the load there would be if all used the replicas as this class does, or by what there is.
            judged = min(total, now.now(name, threshold) / share)
            fits = judged <= room and (total > judged or _keeps_promise(plan, now, trial))
            if fits or threshold == bounds[name].floor:
                break
        chosen[name] = threshold
        aims[name] = Aim(threshold, f"{judged / now.replicas:.0%} of the capacity at {threshold:g} is asked for")
    return aims, memory


POLICIES: Mapping[PolicyName, Law] = {"fixed": fixed, "load": load, "slo": slo, "capacity": capacity}


def _keeps_promise(plan: ControlPlan, now: Load, thresholds: Mapping[str, float]) -> bool:
    promised = plan.settings.slo.tpot_ms
    return promised is None or 1000 * now.token_seconds(thresholds) <= MARGIN * promised


def _views(plan: ControlPlan, asked: Mapping[str, float]) -> dict[str, float]:
    """Return for each class the load there would be if all used what there is as it does, at most what there is."""
    shares, total = {each.name: each.share for each in plan.classes}, sum(asked.values())
    return {name: min(total, asked.get(name, 0.0) * sum(shares.values()) / shares[name]) for name in shares}


def _way_down(bounds: Bounds, part: float) -> float:
    """Return the choice that lies `part` of the way from ceiling to floor."""
    choices = bounds.choices
    return choices[round(min(max(part, 0.0), 1.0) * (len(choices) - 1))]

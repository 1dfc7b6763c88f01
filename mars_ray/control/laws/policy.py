"""The laws: from load to thresholds, as pure functions.

In:    load, bounds of each class, the settings, what the law remembered.
Out:   an aim and its reason for each class; what to remember.
Never: reads a clock, smooths (see `smoother`), answers outside the bounds.

Lowering a threshold costs quality and saves compute, so it goes down with load. Laws of speculative decoding, which
draft less under load to save compute, have the other sign. The block, which costs compute, the engine chooses itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mars_ray.control.backlog import Pace
from mars_ray.control.laws.limits import Bounds
from mars_ray.control.laws.load import Load
from mars_ray.control.laws.speed import Speed
from mars_ray.control.settings import ControlPlan, PolicyName

Memory = Mapping[str, float]

OCCUPANCY_LOW, OCCUPANCY_HIGH = 0.5, 1.5
"""`load`: requests per row from which a threshold falls, and at which it is at its floor."""

GAIN, GAIN_PER_S = 0.3, 0.05
"""`slo`: of the way from ceiling to floor, per 100 % that the latency is above what was promised."""
RELIEF = 4
"""`slo`: times as fast the sum falls as it rises; the smoother keeps thresholds down for long enough."""
WORTH = 3.0
"""`worth`: per cent of speed for one per cent of right answers. In an overload one per cent of speed answers one per
cent more of the requests in time; but a late answer still helps and a wrong one does not, so one is too little."""
LEAST_GAIN = 0.002
"""`worth`: less speed than this is no reason to change anything."""
MARGIN = 0.8
"""Of what was promised: aimed at, so that the tail keeps it too."""

LEVEL = 0.005
"""`deadline`: from one threshold to the next."""
BAND = 0.02
"""`deadline`: so much more speed than is needed before a threshold rises."""
HALF_LIFE, HALF_LIFE_S = 0.1, 10.0
"""`deadline`: measured longer ago than this share of the time left, and than so many seconds, it counts half."""
GUESS = 0.01
"""`deadline`: the prediction counts as if it had been measured for this share of the time left."""
SURE, LATE = 0.03, 0.05
"""`deadline`: an end too late is made known once speed was measured for this share of the time left, and when it is too
late by this share of all the time."""
LEAST = 0.001
"""`deadline`: this part of the predicted speed is always believed in: workers that stand still will go on."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Where a threshold should be."""

    threshold: float
    reason: str
    late_s: float = 0.0
    """So long after its deadline a batch job ends at the lowest thresholds; 0 for as long as it can be in time."""


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
    bounds = _worthwhile(plan, now, bounds)
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
    bounds = _worthwhile(plan, now, bounds)
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
    gain = GAIN_PER_S * (1 if error > 0 else RELIEF)
    summed = min(max(memory.get("sum", 0.0) + gain * error * dt_s, 0.0), 1.0)
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
    plan: ControlPlan, now: Load, bounds: Mapping[str, Bounds], memory: Memory, dt_s: float
) -> tuple[dict[str, Aim], Memory]:
    """Take the highest thresholds at which the replicas keep up, and keep their promise, by their measured speed.

    What the prediction does not see, the latency that is measured does: where `slo` is lower, it wins.
    """
    bounds = _worthwhile(plan, now, bounds)
    measured, memory = slo(plan, now, bounds, memory, dt_s)
    aims = dict[str, Aim]()
    for priority in sorted({each.priority for each in plan.classes}, reverse=True):
        shares = {each.name: each.share for each in plan.classes if each.priority == priority}
        if now.speed is None:
            aims |= {name: Aim(bounds[name].ceiling, "no speed measured yet") for name in shares}
        else:
            aims |= _fitted(plan, now, {name: bounds[name] for name in shares}, shares, aims)
    return {name: min(aim, measured[name], key=_threshold) for name, aim in aims.items()}, memory


def deadline(
    plan: ControlPlan, now: Load, bounds: Mapping[str, Bounds], memory: Memory, dt_s: float
) -> tuple[dict[str, Aim], Memory]:
    """Take the highest threshold at which a batch job ends in time, by the speed measured so far.

    What was predicted is corrected by what came of it, and rows that are longer than was thought show in what is left:
    so first estimates need not be right.
    """
    pace, speed = now.pace, now.speed
    if pace is None or pace.backlog.seconds is None or speed is None:
        return {name: Aim(each.ceiling, "no deadline or no speed known yet") for name, each in bounds.items()}, memory
    tokens, left_s = pace.backlog.tokens, pace.backlog.seconds
    memory = _learned(now, pace, speed, memory, max(left_s, 0.0), dt_s)
    replicas = now.replicas * memory["gained_s"] / memory["measured_s"]
    floor, ceiling = min(each.floor for each in bounds.values()), max(each.ceiling for each in bounds.values())
    levels = list[float]()
    for level in np.linspace(ceiling, floor, 1 + math.ceil((ceiling - floor) / LEVEL)).tolist():
        if not levels or speed.most(level) > speed.most(levels[-1]):  # 1 may be faster than what lies just below it
            levels.append(level)
    fastest = levels[-1]

    def highest(tokens_s: float) -> float:
        return next((level for level in levels if replicas * speed.most(level) >= tokens_s), fastest)

    kept_s = plan.settings.headroom * memory["all_s"]
    needed = tokens / max(left_s - kept_s, left_s / 2, 1.0)
    level = min(max(pace.threshold, highest(needed * (1 + BAND))), highest(needed))
    reason = f"{needed:.0f} of {replicas * speed.most(level):.0f} tokens/s at {level:.3g} are needed"
    late_s = tokens / (replicas * speed.most(fastest)) - left_s
    if memory["measured_s"] < SURE * left_s or late_s <= (0 if memory.get("late_s") else LATE * memory["all_s"]):
        late_s = 0.0
    else:
        reason = f"even at {fastest:.3g} the job ends {late_s:.0f} s after its deadline"
    aims = {name: Aim(min(max(level, each.floor), each.ceiling), reason, late_s) for name, each in bounds.items()}
    return aims, {**memory, "late_s": late_s}


POLICIES: Mapping[PolicyName, Law] = {
    "fixed": fixed,
    "load": load,
    "slo": slo,
    "capacity": capacity,
    "deadline": deadline,
}
ALIKE = (fixed, deadline)
"""Laws that give all replicas the same thresholds."""


def _learned(now: Load, pace: Pace, speed: Speed, memory: Memory, left_s: float, dt_s: float) -> Memory:
    """Return for how long speed was measured, how long the same was predicted to take, and the time there ever was."""
    guess_s = GUESS * max(left_s, 1.0)
    measured_s, gained_s = memory.get("measured_s", guess_s), memory.get("gained_s", guess_s)
    running = round(sum(each.running for each in now.classes) / now.replicas)
    if pace.tokens_s is not None and running:
        predicted = now.replicas * float(speed.rates(pace.threshold)[min(running, speed.rows) - 1])
        keep = 0.5 ** (dt_s / max(HALF_LIFE * left_s, HALF_LIFE_S))
        measured_s, gained_s = keep * measured_s + dt_s, keep * gained_s + dt_s * pace.tokens_s / predicted
    return {
        **memory,
        "measured_s": measured_s,
        "gained_s": max(gained_s, LEAST * measured_s),
        "all_s": max(left_s, memory.get("all_s", 0.0)),
    }


def _fitted(
    plan: ControlPlan, now: Load, bounds: Mapping[str, Bounds], shares: Mapping[str, float], above: Mapping[str, Aim]
) -> dict[str, Aim]:
    """Return the highest thresholds at which classes of one priority fit beside those above them.

    All go down together, and who asks for little for its share stops first: who asks for most pays.
    """
    room, found = now.replicas * (1 - plan.settings.headroom), dict[str, Aim]()
    taken = sum(now.now(name, aim.threshold) for name, aim in above.items())
    levels = sorted({choice for each in bounds.values() for choice in each.choices}, reverse=True)
    for level in levels:
        trial = {name: min(c for c in each.choices if c >= level) for name, each in bounds.items()}
        trial |= {name: aim.threshold for name, aim in found.items()}
        asked = {name: now.now(name, threshold) for name, threshold in trial.items()}
        total = taken + sum(asked.values())
        fits = total <= room and _keeps_promise(plan, now, {n: aim.threshold for n, aim in above.items()} | trial)
        for name in [each for each in bounds if each not in found]:
            # The load there would be if all used the replicas as this class does.
            alike = taken + asked[name] * sum(shares.values()) / shares[name]
            modest = alike <= room and alike < total * (1 - 1e-9)  # equal ones pay together
            if fits or modest or level == levels[-1]:
                judged = min(total, alike) / now.replicas
                found[name] = Aim(trial[name], f"{judged:.0%} of the capacity at {trial[name]:g} is asked for")
    return found


def _threshold(aim: Aim) -> float:
    return aim.threshold


def _worthwhile(plan: ControlPlan, now: Load, bounds: Mapping[str, Bounds]) -> Mapping[str, Bounds]:
    """Return the bounds with the choices that buy more than they cost, once the speed of each is known."""
    if now.speed is None:
        return bounds
    return {name: replace(each, levels=worth(plan, now, name, each.choices)) for name, each in bounds.items()}


def worth(plan: ControlPlan, now: Load, name: str, choices: Sequence[float]) -> tuple[float, ...]:
    """Return those of `choices`, which fall, that buy a class more than they cost it.

    With all rows in use, each has to answer more requests in a second than the one before it, by `WORTH` per cent or
    more for each per cent of right answers it loses by calibration; of tokens that agree, where no answer could be
    judged. Reading prompts takes the same time at every threshold, so where prompts are long there is less to win.
    What lies below all that was calibrated is left out.
    """
    kept, calibrated = [choices[0]], [threshold for threshold, _ in plan.accuracy or plan.agreement]
    lowest = min(calibrated) if len(calibrated) > 1 else 0.0
    for choice in choices[1:]:
        if choice < lowest:
            break
        gain = now.request_seconds(name, kept[-1]) / now.request_seconds(name, choice) - 1
        if gain > LEAST_GAIN + WORTH * (plan.quality(kept[-1]) - plan.quality(choice)):
            kept.append(choice)
    return tuple(kept)


def _keeps_promise(plan: ControlPlan, now: Load, thresholds: Mapping[str, float]) -> bool:
    """Say whether classes with these thresholds are fast enough; what others ask for comes after them."""
    promised = plan.settings.slo.tpot_ms
    if promised is None:
        return True
    now = replace(now, classes=tuple(each for each in now.classes if each.name in thresholds))
    return 1000 * now.token_seconds(thresholds) <= MARGIN * promised


def _views(plan: ControlPlan, asked: Mapping[str, float]) -> dict[str, float]:
    """Return for each class the load there would be if all of its priority used what there is as it does.

    It is at most what there is; classes of lower priority do not count.
    """
    views = {}
    for each in plan.classes:
        peers = [other for other in plan.classes if other.priority == each.priority]
        above = sum(asked.get(other.name, 0.0) for other in plan.classes if other.priority > each.priority)
        mine = asked.get(each.name, 0.0) * sum(other.share for other in peers) / each.share
        views[each.name] = above + min(mine, sum(asked.get(other.name, 0.0) for other in peers))
    return views


def _way_down(bounds: Bounds, part: float) -> float:
    """Return the choice that lies `part` of the way from ceiling to floor."""
    choices = bounds.choices
    return choices[round(min(max(part, 0.0), 1.0) * (len(choices) - 1))]

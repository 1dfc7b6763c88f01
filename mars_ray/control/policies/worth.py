"""Select thresholds that bring more requests in time than they cost right answers, at the operator's exchange rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.bounds import Bounds

IN_TIME_PER_CAPACITY = 3.0
"""Percentage points of requests in time that one per cent more capacity brings where it is short: simulations give 9 to
13 around full load, where queues build up and drain, and 1 to 6 in lasting overload."""
SPREAD = 0.15
"""Standard deviation of the logarithm of the load from second to second."""
LEAST_ODDS, EVEN = 0.002, 0.5
"""Odds that capacity is short at which the cheapest steps are taken, and the dearest or those of unknown price."""
LEAST_GAIN = 0.002
"""Less capacity than this is no reason to change anything."""
MARGIN = 0.8
"""Share of the promised latency that is aimed at, so that the tail keeps the promise too."""


def aimed_tpot_s(plan: ControlPlan) -> float | None:
    """Return the seconds per token that are aimed at; None where none were promised."""
    promised_ms = plan.settings.slo.tpot_ms
    return None if promised_ms is None else MARGIN * promised_ms / 1000


def worst_latency(plan: ControlPlan, load: ClusterLoad) -> tuple[float, str]:
    """Return the latency that is measured as a share of the promised one, the worse of the two, and its name."""
    promised = plan.settings.slo
    measured = [
        (found_s * 1000 / limit_ms, what)
        for found_s, limit_ms, what in (
            (load.ttft_p95_s, promised.ttft_ms, "time to first token"),
            (load.tpot_p95_s, promised.tpot_ms, "time per token"),
        )
        if found_s is not None and limit_ms is not None
    ]
    return max(measured, default=(0.0, "nothing promised or measured, latency"))


def worthwhile_bounds(plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds]) -> Mapping[str, Bounds]:
    """Return the bounds with the choices that bring more than they cost, once the speed of each is known."""
    if load.speed is None:
        return bounds
    return {name: replace(each, levels=worthwhile(plan, load, name, each.choices)) for name, each in bounds.items()}


def worthwhile(plan: ControlPlan, load: ClusterLoad, name: str, choices: Sequence[float]) -> tuple[float, ...]:
    """Return those of the falling `choices` that bring a class more than they cost it wherever capacity is short.

    What lies below all that was calibrated is left out.
    """
    kept, calibrated = [choices[0]], [threshold for threshold, _ in plan.accuracy or plan.agreement]
    lowest = min(calibrated) if len(calibrated) > 1 else 0.0
    for choice in choices[1:]:
        if choice >= lowest and _price(plan, load, name, kept[-1], choice) < 1:
            kept.append(choice)
    return tuple(kept)


def room_above(plan: ControlPlan, load: ClusterLoad, name: str, high: float, low: float) -> float:
    """Return the share of a replica's time that a class at `high` may take before `low` pays.

    Load varies: a share below 1 on average is above it now and then. A cheap step pays when that is seldom, a dear one
    when it is as often as not. Steps are taken early only as far as the measured latency is near what was promised:
    while it is far below, capacity is not short.
    """
    near = min(worst_latency(plan, load)[0] / MARGIN, 1.0)
    known = bool(plan.accuracy or plan.agreement)
    odds = min(max(_price(plan, load, name, high, low), LEAST_ODDS), EVEN) if known else EVEN
    return (1 - plan.settings.headroom) * math.exp(near * SPREAD * NormalDist().inv_cdf(odds))


def _price(plan: ControlPlan, load: ClusterLoad, name: str, high: float, low: float) -> float:
    """Return the share of the time that capacity has to be short at `high` for `low` to pay; never where 1 or more.

    Capacity is requests a second within the promised time per token, with the reading of prompts. What it brings has
    to be `in_time_per_accuracy` points of requests in time for each point of accuracy lost by calibration; of tokens
    that agree, where no answer could be judged.
    """
    tpot_s = aimed_tpot_s(plan)
    gain = load.request_seconds(name, high, tpot_s) / load.request_seconds(name, low, tpot_s) - 1
    if gain <= LEAST_GAIN:
        return math.inf
    cost = plan.settings.in_time_per_accuracy * (plan.quality(high) - plan.quality(low))
    return cost / (IN_TIME_PER_CAPACITY * gain)

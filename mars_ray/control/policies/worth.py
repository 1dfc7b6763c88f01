"""Select thresholds whose gain in requests finished in time is worth their loss of right answers.

The operator's exchange rate `in_time_per_accuracy` compares the two.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.bounds import Bounds

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

"""The policy `load`: thresholds follow how many requests there are."""

from collections.abc import Mapping
from dataclasses import dataclass

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.bounds import Bounds
from mars_ray.control.policies.policy import Decision, Policy, fair_loads
from mars_ray.control.policies.worth import MARGIN, worst_latency, worthwhile_bounds

OCCUPANCY_LOW, OCCUPANCY_HIGH = 0.5, 1.5
"""Requests per row from which a threshold falls, and at which it is at its floor."""


def decide_by_load(
    plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], _state: None, _dt_s: float
) -> tuple[dict[str, Decision], None]:
    """Lower thresholds in proportion to how many requests there are for each row."""
    bounds = worthwhile_bounds(plan, load, bounds)
    requests = {each.name: (each.running + each.waiting) / max(1, load.rows) for each in load.classes}
    decisions = {}
    for name, occupancy in fair_loads(plan, requests).items():
        part = (occupancy - OCCUPANCY_LOW) / (OCCUPANCY_HIGH - OCCUPANCY_LOW)
        decisions[name] = Decision(bounds[name].at(part), f"{occupancy:.2f} requests for each row")
    return decisions, None


LOAD = Policy(decide_by_load, initial=None)


GAIN, GAIN_PER_S = 0.3, 0.05
"""Share of the way from ceiling to floor, per 100 % that the latency is above what was promised."""
RELIEF = 4
"""The integral falls so many times as fast as it rises; the smoother keeps thresholds down for long enough."""


@dataclass(frozen=True, slots=True)
class SloState:
    """What the PI controller remembers."""

    integral: float = 0.0
    """The summed error, as a share of the way from ceiling to floor: from 0 to 1."""


def decide_by_slo(
    plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], state: SloState, dt_s: float
) -> tuple[dict[str, Decision], SloState]:
    """Lower thresholds until the latency that is measured is the one that was promised."""
    return follow_latency(plan, load, worthwhile_bounds(plan, load, bounds), state, dt_s)


def follow_latency(
    plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], state: SloState, dt_s: float
) -> tuple[dict[str, Decision], SloState]:
    """Do the same within bounds that hold only what is worthwhile."""
    worst, what = worst_latency(plan, load)
    error = worst / MARGIN - 1
    # The integral stays between the bounds of what it controls: it must not take minutes to come back from a long peak.
    gain = GAIN_PER_S * (1 if error > 0 else RELIEF)
    integral = min(max(state.integral + gain * error * dt_s, 0.0), 1.0)
    part = min(max(integral + GAIN * error, 0.0), 1.0)
    reason = f"{what} is {worst:.0%} of what was promised"
    loads = fair_loads(plan, {each.name: each.running + each.waiting for each in load.classes})
    heaviest = max(loads.values(), default=0.0)
    decisions = {
        # A class that asks for less than its share pays for the load of others in latency, never in quality.
        name: Decision(bounds[name].at(part if own >= heaviest else 0.0), reason)
        for name, own in loads.items()
    }
    return decisions, SloState(integral)


SLO = Policy(decide_by_slo, initial=SloState())

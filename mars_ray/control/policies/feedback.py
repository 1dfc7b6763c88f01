"""The policies `load` and `slo`: thresholds follow the number of requests, or the measured latency."""

from collections.abc import Mapping
from dataclasses import dataclass

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.bounds import Bounds
from mars_ray.control.policies.policy import Decision, Policy, fair_loads
from mars_ray.control.policies.worth import MARGIN, worst_latency, worthwhile_bounds

OCCUPANCY_LOW = 0.5
OCCUPANCY_HIGH = 1.5
"""Thresholds fall from the ceiling at `OCCUPANCY_LOW` requests per row to the floor at `OCCUPANCY_HIGH`."""


def decide_by_load(
    plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], _state: None, _dt_s: float
) -> tuple[dict[str, Decision], None]:
    """Lower thresholds in proportion to the number of requests per row."""
    bounds = worthwhile_bounds(plan, load, bounds)
    requests = {demand.name: (demand.running + demand.waiting) / max(1, load.rows) for demand in load.classes}
    decisions = {}
    for name, occupancy in fair_loads(plan, requests).items():
        part = (occupancy - OCCUPANCY_LOW) / (OCCUPANCY_HIGH - OCCUPANCY_LOW)
        decisions[name] = Decision(bounds[name].at(part), f"{occupancy:.2f} requests per row")
    return decisions, None


LOAD = Policy(decide_by_load, initial=None)


GAIN = 0.3
GAIN_PER_S = 0.05
"""Proportional gain and integral gain: the share of the way from ceiling to floor by which thresholds fall if latency
is 100 % above the promise."""
RELIEF = 4
"""How many times faster the integral falls than it rises. The smoother still keeps thresholds down for long enough."""


@dataclass(frozen=True, slots=True)
class SloState:
    """State of the PI controller."""

    integral: float = 0.0
    """Integrated error, from 0 to 1, as a share of the way from ceiling to floor."""


def decide_by_slo(
    plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], state: SloState, dt_s: float
) -> tuple[dict[str, Decision], SloState]:
    """Lower thresholds until the measured latency meets the promise."""
    return follow_latency(plan, load, worthwhile_bounds(plan, load, bounds), state, dt_s)


def follow_latency(
    plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], state: SloState, dt_s: float
) -> tuple[dict[str, Decision], SloState]:
    """Decide as `decide_by_slo` does, within bounds that contain only worthwhile thresholds."""
    worst, latency_name = worst_latency(plan, load)
    error = worst / MARGIN - 1
    # The integral is clipped, because it must not take minutes to recover from a long peak.
    gain = GAIN_PER_S * (1 if error > 0 else RELIEF)
    integral = min(max(state.integral + gain * error * dt_s, 0.0), 1.0)
    part = min(max(integral + GAIN * error, 0.0), 1.0)
    reason = f"{latency_name} is {worst:.0%} of what was promised"
    loads = fair_loads(plan, {demand.name: demand.running + demand.waiting for demand in load.classes})
    heaviest = max(loads.values(), default=0.0)
    decisions = {
        # A class that uses less than its share pays for the load of others with latency, never with quality.
        name: Decision(bounds[name].at(part if own >= heaviest else 0.0), reason)
        for name, own in loads.items()
    }
    return decisions, SloState(integral)


SLO = Policy(decide_by_slo, initial=SloState())

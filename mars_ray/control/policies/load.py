"""The policy `load`: thresholds follow how many requests there are."""

from collections.abc import Mapping

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.policies.bounds import Bounds
from mars_ray.control.policies.fair_share import fair_loads
from mars_ray.control.policies.policy import Decision, Policy
from mars_ray.control.policies.worth import worthwhile_bounds
from mars_ray.control.settings import ControlPlan

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

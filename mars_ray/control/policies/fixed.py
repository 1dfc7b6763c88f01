"""The policy `fixed`: thresholds never move."""

from collections.abc import Mapping

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.policies.bounds import Bounds
from mars_ray.control.policies.policy import Decision, Policy
from mars_ray.control.settings import ControlPlan


def decide_fixed(
    _plan: ControlPlan, _load: ClusterLoad, bounds: Mapping[str, Bounds], _state: None, _dt_s: float
) -> tuple[dict[str, Decision], None]:
    """Leave every threshold at its ceiling."""
    return {name: Decision(each.ceiling, "fixed") for name, each in bounds.items()}, None


FIXED = Policy(decide_fixed, initial=None, uniform=True)

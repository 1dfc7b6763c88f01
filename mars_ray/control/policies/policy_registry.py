"""The control policies by their names in the settings."""

from collections.abc import Mapping
from typing import Any

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan, PolicyName
from mars_ray.control.policies.capacity import CAPACITY
from mars_ray.control.policies.deadline import DEADLINE
from mars_ray.control.policies.policy import Bounds, Decision, Policy


def decide_fixed(
    _plan: ControlPlan, _load: ClusterLoad, bounds: Mapping[str, Bounds], _state: None, _dt_s: float
) -> tuple[dict[str, Decision], None]:
    """Leave every threshold at its ceiling."""
    return {name: Decision(bound.ceiling, "fixed") for name, bound in bounds.items()}, None


POLICIES: Mapping[PolicyName, Policy[Any]] = {
    "fixed": Policy(decide_fixed, initial=None, uniform=True),
    "capacity": CAPACITY,
    "deadline": DEADLINE,
}

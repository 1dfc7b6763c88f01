"""The policies by the names that settings know them under."""

from collections.abc import Mapping
from typing import Any

from mars_ray.control.policies.capacity import CAPACITY
from mars_ray.control.policies.deadline import DEADLINE
from mars_ray.control.policies.fixed import FIXED
from mars_ray.control.policies.load import LOAD
from mars_ray.control.policies.policy import Policy
from mars_ray.control.policies.slo import SLO
from mars_ray.control.settings import PolicyName

POLICIES: Mapping[PolicyName, Policy[Any]] = {
    "fixed": FIXED,
    "load": LOAD,
    "slo": SLO,
    "capacity": CAPACITY,
    "deadline": DEADLINE,
}

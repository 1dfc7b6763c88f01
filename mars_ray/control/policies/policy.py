"""The interface of a control policy: a pure function from load and state to a threshold for each class.

In:    load, bounds of each class, the settings, the state that the policy returned last.
Out:   a decision and its reason for each class; the next state.
Never: reads a clock, smooths (see `smoother`), decides outside the bounds.

Lowering a threshold costs quality and saves compute, so it goes down with load. Policies of speculative decoding,
which draft less under load to save compute, have the other sign. The block, which costs compute, the engine chooses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.bounds import Bounds

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Decision:
    """The threshold that a policy wants for one class, and the reason."""

    threshold: float
    reason: str
    late_s: float = 0.0
    """Seconds after its deadline that a batch job ends even at the lowest thresholds; 0 while it can be in time."""


Decide = Callable[[ControlPlan, ClusterLoad, Mapping[str, Bounds], State, float], tuple[dict[str, Decision], State]]
"""(plan, load, bounds by class, state, seconds since the last call) -> (decisions by class, next state)."""


@dataclass(frozen=True, slots=True)
class Policy(Generic[State]):
    """A function that decides, and the state it begins with."""

    decide: Decide[State]
    initial: State
    uniform: bool = False
    """Whether all replicas always get the same thresholds."""


def threshold_of(decision: Decision) -> float:
    """Return the threshold, as a key to compare decisions by."""
    return decision.threshold


def fair_loads(plan: ControlPlan, requests: Mapping[str, float]) -> dict[str, float]:
    """Return for each class the load if all classes of its priority used the cluster as it does.

    It is at most what there is; classes of lower priority do not count.
    """
    loads = {}
    for each in plan.classes:
        peers = [other for other in plan.classes if other.priority == each.priority]
        above = sum(requests.get(other.name, 0.0) for other in plan.classes if other.priority > each.priority)
        alike = requests.get(each.name, 0.0) * sum(other.share for other in peers) / each.share
        loads[each.name] = above + min(alike, sum(requests.get(other.name, 0.0) for other in peers))
    return loads

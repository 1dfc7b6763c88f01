"""The interface of a control policy: a pure function from load and state to a threshold for each class.

In:    the load, the bounds of each class, the settings, and the state that the policy returned last.
Out:   a decision and its reason for each class; the next state.
Never: reads a clock, smooths thresholds (see `Smoother`), or decides outside the bounds.

Lower thresholds save compute at the cost of quality, so thresholds fall when load rises. Policies for speculative
decoding do the opposite: they draft less under load, because drafts cost compute. Here the block determines the number
of drafts, and the engine chooses it.
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
    """The threshold that a policy chooses for one class, and the reason."""

    threshold: float
    reason: str
    late_s: float = 0.0
    """Seconds by which a batch job will miss its deadline even at the lowest thresholds; 0 if it can end in time."""


Decide = Callable[[ControlPlan, ClusterLoad, Mapping[str, Bounds], State, float], tuple[dict[str, Decision], State]]
"""(plan, load, bounds by class, state, seconds since the last call) -> (decisions by class, next state)."""


@dataclass(frozen=True, slots=True)
class Policy(Generic[State]):
    """A function that decides on thresholds, and its initial state."""

    decide: Decide[State]
    initial: State
    uniform: bool = False
    """Whether all replicas always get the same thresholds."""

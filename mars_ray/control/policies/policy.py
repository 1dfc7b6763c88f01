"""The interface of a control policy: a pure function from load and state to a threshold for each class, within bounds.

In:    the load, the bounds of each class, the settings, and the state that the policy returned last.
Out:   a decision and its reason for each class; the next state.
Never: reads a clock, smooths thresholds (see `Smoother`), decides outside the bounds, or raises a floor because of only
       a few audited tokens.

Lower thresholds save compute at the cost of quality, so thresholds fall when load rises. Policies for speculative
decoding do the opposite: they draft less under load, because drafts cost compute. Here the block determines the number
of drafts, and the engine chooses it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan, interpolate_quality
from mars_ray.engine.stats.grid import GRID
from mars_ray.engine.stats.profile import ProfilePoint

SURE_TOKENS = 200.0
"""Minimum number of audited tokens for an audit to count."""
SIGMAS = 3.0
"""Number of standard deviations by which an audit must be below the limit to raise a floor. Two would raise false
alarms, because there are thousands of decisions a day."""
NEVER_MEASURED = (
    "the right answers that lower thresholds lose were never measured: calibrate the model on tasks, or set a floor"
)
State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of one class's threshold, and the worthwhile values in that range.

    The range follows from the operator's floor, the calibration and the live audit.
    """

    floor: float
    ceiling: float
    operator_floor: float
    """The floor that the operator set."""
    floor_reason: str = ""
    """Reason for a floor above the one that the operator set; otherwise empty."""
    levels: tuple[float, ...] = ()
    """The choices that are worth their cost; if empty, all choices are used."""

    @property
    def choices(self) -> tuple[float, ...]:
        """Thresholds to choose from, highest first: both ends, and the profile's grid between them."""
        if self.levels:
            return self.levels
        between = [value for value in GRID if self.floor < value < self.ceiling]
        return (self.ceiling, *between, *([self.floor] if self.floor < self.ceiling else []))

    def at(self, part: float) -> float:
        """Return the choice that lies `part` of the way from ceiling to floor; `part` is clipped to between 0 and 1."""
        choices = self.choices
        return choices[round(min(max(part, 0.0), 1.0) * (len(choices) - 1))]


def bounds_of(plan: ControlPlan, profiles: Iterable[tuple[ProfilePoint, ...]]) -> dict[str, Bounds]:
    """Return the bounds of every class.

    A class without a floor of its own keeps its ceiling if nobody knows how many right answers a lower threshold loses.
    """
    measured = _quality_floor(plan, profiles)
    unknown = plan.settings.policy == "capacity" and not plan.accuracy
    bounds = {}
    for service_class in plan.classes:
        floor = plan.floor(service_class.name)
        lowest, reason = (plan.ceiling, NEVER_MEASURED) if unknown and service_class.floor is None else measured
        raised = min(max(floor, lowest), plan.ceiling)
        bounds[service_class.name] = Bounds(raised, plan.ceiling, floor, reason if raised > floor else "")
    return bounds


def describe_raised_floor(name: str, set_floor: float, floor: float, reason: str) -> str:
    """Return a sentence that explains the raised floor of a class; empty if the floor is not raised."""
    return (
        f"class {name}: the floor is set to {set_floor:g} but raised to {floor:g}, because {reason}" if reason else ""
    )


def describe_bounds(name: str, bounds: Bounds) -> str:
    """Return a sentence about the range of the threshold of a class, and the reason for its lower end."""
    if bounds.floor >= bounds.ceiling:
        range_text = f"threshold {bounds.ceiling:g}, whatever the load"
    else:
        range_text = f"thresholds from {bounds.ceiling:g} down to {bounds.floor:g}, depending on load"
    reason = f"its floor is {bounds.operator_floor:g}"
    if bounds.floor_reason:
        reason = f"{bounds.floor_reason} ({reason})"
    return f"class {name}: {range_text}; no lower, because {reason}"


def _agreement(points: list[ProfilePoint]) -> tuple[float, float]:
    """Return the mean agreement that audits of several replicas found, and the number of audited tokens."""
    audited = sum(point.audited for point in points)
    return sum((point.agreement or 0.0) * point.audited for point in points) / audited, audited


def _quality_floor(plan: ControlPlan, profiles: Iterable[tuple[ProfilePoint, ...]]) -> tuple[float, str]:
    """Return the lowest threshold such that it and all higher ones keep the required quality, and the reason for it."""
    min_agreement = plan.settings.min_agreement
    calibrated = {1.0: 1.0} | dict(plan.agreement) if plan.agreement else {}
    least = min((threshold for threshold, _ in (*plan.agreement, *plan.accuracy)), default=0.0)
    lowest = 0.0
    audits = defaultdict[float, list[ProfilePoint]](list)
    for point in chain.from_iterable(profiles):
        if point.audited and point.agreement is not None:
            audits[point.threshold].append(point)
    live = {threshold: _agreement(points) for threshold, points in audits.items()}
    for threshold in calibrated.keys() & live.keys():
        agreement, audited = live[threshold]
        if audited >= SURE_TOKENS:
            calibrated[threshold] = max(calibrated[threshold], agreement)
    for threshold in sorted({*GRID, *calibrated, *dict(plan.accuracy)}, reverse=True):
        if threshold < least:
            return lowest, f"calibration tried no threshold below {least:g}"
        lost = plan.quality(1.0) - plan.quality(threshold) if plan.accuracy else 0.0
        if lost > plan.settings.max_accuracy_loss:
            return lowest or 1.0, f"calibration found {lost:.3f} of the right answers lost at {threshold:g}"
        agreement, audited = live.get(threshold, (1.0, 0.0))
        if audited >= SURE_TOKENS:
            error = math.sqrt(max(agreement * (1 - agreement), 1 / audited) / audited)
            if agreement + SIGMAS * error < min_agreement:
                return lowest or 1.0, f"the live audit found {agreement:.3f} agreement at {threshold:g}"
        elif calibrated and (expected := interpolate_quality([*calibrated.items()], threshold)) < min_agreement:
            return lowest or 1.0, f"calibration found {expected:.3f} agreement at {threshold:g}"
        lowest = threshold
    return 0.0, ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The threshold that a policy chooses for one class, and the reason."""

    threshold: float
    reason: str
    late_s: float = 0.0
    """Seconds by which a batch job will miss its deadline even at the fastest thresholds; 0 if it can end in time."""


Decide = Callable[[ControlPlan, ClusterLoad, Mapping[str, Bounds], State, float], tuple[dict[str, Decision], State]]
"""(plan, load, bounds by class, state, seconds since the last call) -> (decisions by class, next state)."""


@dataclass(frozen=True, slots=True)
class Policy(Generic[State]):
    """A function that decides on thresholds, and its initial state."""

    decide: Decide[State]
    initial: State
    uniform: bool = False
    """Whether all replicas always get the same thresholds."""

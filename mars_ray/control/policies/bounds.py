"""Bounds of thresholds, from the operator's floor, the calibration and the live audit.

In:    the plan, the profiles of the replicas.
Out:   floor and ceiling of each class, and why a floor is higher than was set.
Never: takes few audited tokens for proof.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from mars_ray.control.control_settings import ControlPlan
from mars_ray.engine.stats.profile import GRID, ProfilePoint

SURE_TOKENS = 200.0
"""Audited tokens before an audit says anything."""
SIGMAS = 3.0
"""Standard deviations that an audit must be below the limit: with thousands of decisions a day, two would raise false
alarms."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of the threshold of one class, and the worthwhile values in it."""

    floor: float
    ceiling: float
    asked: float
    """The floor that the operator set."""
    floor_reason: str = ""
    """Why the floor is above the one that was set; empty when it is not."""
    levels: tuple[float, ...] = ()
    """The choices that are worth something; empty for all."""

    @property
    def choices(self) -> tuple[float, ...]:
        """Thresholds to choose from, falling: those of the profile's grid in between, and both ends."""
        if self.levels:
            return self.levels
        between = [value for value in GRID if self.floor < value < self.ceiling]
        return (self.ceiling, *between, *([self.floor] if self.floor < self.ceiling else []))

    def at(self, part: float) -> float:
        """Return the choice that lies `part` of the way from ceiling to floor; beyond 0 and 1 it is one of them."""
        choices = self.choices
        return choices[round(min(max(part, 0.0), 1.0) * (len(choices) - 1))]


def bounds_of(plan: ControlPlan, profiles: Iterable[tuple[ProfilePoint, ...]]) -> dict[str, Bounds]:
    """Return the bounds of every class."""
    least, why = _quality_floor(plan, profiles)
    bounds = {}
    for each in plan.classes:
        floor = plan.floor(each.name)
        raised = min(max(floor, least), plan.ceiling)
        bounds[each.name] = Bounds(raised, plan.ceiling, floor, why if raised > floor else "")
    return bounds


def describe_raised_floor(name: str, asked: float, floor: float, reason: str) -> str:
    """Return a sentence about a raised floor of a class; empty if the floor is the one set."""
    return f"class {name}: floor {asked:g} asked, {floor:g} in force, for {reason}" if reason else ""


def describe_bounds(name: str, bounds: Bounds) -> str:
    """Return a sentence about the range of the threshold of a class, and the reason for its lower end."""
    if bounds.floor >= bounds.ceiling:
        moves = f"threshold {bounds.ceiling:g}, whatever the load"
    else:
        moves = f"thresholds from {bounds.ceiling:g} down to {bounds.floor:g}, by load"
    asked = f"its floor is {bounds.asked:g}"
    return f"class {name}: {moves}; no lower, as {f'{bounds.floor_reason} ({asked})' if bounds.floor_reason else asked}"


def _quality_floor(plan: ControlPlan, profiles: Iterable[tuple[ProfilePoint, ...]]) -> tuple[float, str]:
    """Return the lowest threshold that, like all above it, keeps the demanded quality, and the limiting reason."""
    asked, calibrated = plan.settings.min_agreement, dict(plan.agreement)
    right, lowest = dict(plan.accuracy), 0.0
    audits = defaultdict[float, list[ProfilePoint]](list)
    for point in chain.from_iterable(profiles):
        if point.audited and point.agreement is not None:
            audits[point.threshold].append(point)
    for threshold in sorted({*GRID, *calibrated, *right}, reverse=True):
        lost = right.get(1.0, 0.0) - right.get(threshold, 1.0)
        if lost > plan.settings.max_accuracy_loss:
            return lowest or 1.0, f"calibration found {lost:.3f} of the right answers lost at {threshold:g}"
        audited = sum(point.audited for point in audits[threshold])
        if audited >= SURE_TOKENS:
            agreement = sum((point.agreement or 0.0) * point.audited for point in audits[threshold]) / audited
            error = math.sqrt(max(agreement * (1 - agreement), 1 / audited) / audited)
            if agreement + SIGMAS * error < asked:
                return lowest or 1.0, f"the live audit found {agreement:.3f} agreement at {threshold:g}"
        elif calibrated.get(threshold, 1.0) < asked:
            return lowest or 1.0, f"calibration found {calibrated[threshold]:.3f} agreement at {threshold:g}"
        lowest = threshold
    return 0.0, ""

"""Which thresholds buy more speed than they cost in right answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.policies.bounds import Bounds
from mars_ray.control.settings import ControlPlan

SPEED_PER_QUALITY = 3.0
"""Per cent of speed that one per cent of right answers is worth. In an overload one per cent of speed answers one per
cent more of the requests in time; but a late answer still helps and a wrong one does not, so one is too little."""
LEAST_GAIN = 0.002
"""Less speed than this is no reason to change anything."""


def worthwhile_bounds(plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds]) -> Mapping[str, Bounds]:
    """Return the bounds with the choices that buy more than they cost, once the speed of each is known."""
    if load.speed is None:
        return bounds
    return {name: replace(each, levels=worthwhile(plan, load, name, each.choices)) for name, each in bounds.items()}


def worthwhile(plan: ControlPlan, load: ClusterLoad, name: str, choices: Sequence[float]) -> tuple[float, ...]:
    """Return those of the falling `choices` that buy a class more than they cost it.

    With all rows in use, each has to answer more requests in a second than the one before it, by `SPEED_PER_QUALITY`
    per cent or more for each per cent of right answers it loses by calibration; of tokens that agree, where no answer
    could be judged. Reading prompts takes the same time at every threshold, so where prompts are long there is less to
    win. What lies below all that was calibrated is left out.
    """
    kept, calibrated = [choices[0]], [threshold for threshold, _ in plan.accuracy or plan.agreement]
    lowest = min(calibrated) if len(calibrated) > 1 else 0.0
    for choice in choices[1:]:
        if choice < lowest:
            break
        gain = load.request_seconds(name, kept[-1]) / load.request_seconds(name, choice) - 1
        if gain > LEAST_GAIN + SPEED_PER_QUALITY * (plan.quality(kept[-1]) - plan.quality(choice)):
            kept.append(choice)
    return tuple(kept)

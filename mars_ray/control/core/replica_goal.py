"""The number of replicas that the demand needs to be served at full quality and within the promised latency.

In:    the load; whether the policy wants lower thresholds; the state that was returned last.
Out:   the desired number of replicas, and the next state.
Never: reads a clock, answers a shortage twice because the new replicas are still starting, or falls for a dip in load
       that is shorter than `HOLD_S`.

Demand alone cannot know at which utilisation a promise about latency is kept, because that depends on how requests
arrive. So the share of its time that a replica may be used is learned from measured latency.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.capacity import worst_latency
from mars_ray.control.policies.spare import callers_alone, has_batches, needed_replicas

WELL_USED = 0.8
"""Share of a replica's time that demand should take at full quality, as long as no promise has taught another."""
MOST_USED = 0.95
"""Upper bound of the learned share, because demand is an estimate."""
LEAST_USED = 0.2
"""Lower bound of the learned share, because more replicas do not help with a promise that none keeps at any load."""
SHORT_S = 30.0
"""Seconds for which the promise must have been missed, or kept by lower thresholds only, before the share falls."""
KEPT_WEIGHT = 0.5
"""Weight of a second in which the promise was kept. A promise about 95 of 100 requests allows some misses, and misses
come in bursts, so the promise is kept while less than a third of all seconds miss it."""
DRAIN_S = 30.0
"""Seconds that the queue of a shortage has to drain, once the replicas that the demand needs take requests."""
STEP = 1.15
"""Factor between the utilisation during shortage and the new target. It applies twice at most, because a shortage at
low utilisation has other causes."""
ROOMY = 0.6
"""Latency below this share of the promise leaves room for more load on each replica."""
LITTLE = 0.7
"""Load below this part of the share is little: its latency does not tell whether more load would fit."""
ROOMY_S = 120.0
MOST_ROOMY_S = 3600.0
"""Seconds for which there must have been room before the share rises by `RISE`. They double with each miss, so attempts
to run with fewer replicas become rare where they fail."""
RISE = 1.1
SURE_S = 15.0
"""Seconds for which at least a number of replicas must have been needed before it is desired. Demand is measured over
seconds, so a peak may be chance, which a hold would turn into replicas that stay."""
HOLD_S = 300.0
"""Seconds for which the highest number of replicas that was desired stays desired: longer than the pauses of usual
bursts, because an autoscaler may act on what is desired in a pause."""


@dataclass(frozen=True, slots=True)
class GoalState:
    """Memory of the goal between two decisions."""

    well_used: float = WELL_USED
    """Utilisation of a replica that keeps the promise, as learned so far."""
    short_s: float = 0.0
    """Seconds of shortage, less the weighted seconds without; negative while a queue drains."""
    short_used: float = 0.0
    """Mean utilisation of the replicas during shortage."""
    roomy_s: float = 0.0
    """Seconds of room, less the seconds without. Seconds of little load count as neither."""
    patience_s: float = ROOMY_S
    """Seconds of room before the share rises."""
    needed: tuple[tuple[float, int], ...] = ()
    """Ages and numbers of replicas that were needed in the last `SURE_S` seconds: ages fall, numbers rise."""
    held: tuple[tuple[float, int], ...] = ()
    """Pairs of age and number of replicas desired in the last `HOLD_S` seconds, both falling."""


def desired_replicas(
    plan: ControlPlan, load: ClusterLoad, state: GoalState, dt_s: float, *, lowered: bool
) -> tuple[int, GoalState]:
    """Return the desired number of replicas, which is 0 until the speed is known, and the next state.

    `lowered` says whether the policy wants a threshold below the ceiling. Without a promise in `plan.settings.slo` the
    result follows the demand alone.
    """
    if load.speed is None:
        return 0, state
    needed = needed_replicas(load, plan.ceiling)
    load = callers_alone(load) if has_batches(load) else load
    share = sum(load.arriving_share(demand.name, plan.ceiling) for demand in load.classes) + needed
    promised = plan.settings.slo
    if promised.ttft_ms is None and promised.tpot_ms is None:
        return ceil(share / WELL_USED), state
    worst, _ = worst_latency(plan, load)
    if state.held and state.held[0][1] > load.replicas:  # explains why latency is high until they take requests
        state = replace(state, short_s=-DRAIN_S, roomy_s=0.0)
    else:
        state = _learn(state, share / load.replicas, worst, dt_s, lowered=lowered)
    return _hold(state, ceil(share / state.well_used), dt_s)


def _learn(state: GoalState, used: float, worst: float, dt_s: float, *, lowered: bool) -> GoalState:
    """Adapt the target utilisation to the latency of replicas whose utilisation is `used`."""
    if worst > 1 or lowered:
        return _learn_shortage(state, used, dt_s)
    state = replace(state, short_s=max(0.0, state.short_s - KEPT_WEIGHT * dt_s))
    if worst >= ROOMY:
        return replace(state, roomy_s=max(0.0, state.roomy_s - dt_s))
    if used < LITTLE * state.well_used:
        return state
    roomy_s = state.roomy_s + dt_s
    if roomy_s >= state.patience_s:
        return replace(state, well_used=min(MOST_USED, state.well_used * RISE), roomy_s=0.0)
    return replace(state, roomy_s=roomy_s)


def _learn_shortage(state: GoalState, used: float, dt_s: float) -> GoalState:
    """Count seconds of shortage, and lower the target utilisation after enough of them."""
    before_s = max(0.0, state.short_s)
    short_used = (before_s * state.short_used + dt_s * used) / (before_s + dt_s) if dt_s else state.short_used
    roomy_s = max(0.0, state.roomy_s - dt_s)
    short_s = state.short_s + dt_s
    if short_s < SHORT_S:
        return replace(state, short_s=short_s, short_used=short_used, roomy_s=roomy_s)
    return replace(
        state,
        well_used=max(LEAST_USED, state.well_used / STEP**2, min(state.well_used, short_used) / STEP),
        short_s=0.0,
        short_used=0.0,
        roomy_s=0.0,
        patience_s=min(2 * state.patience_s, MOST_ROOMY_S),
    )


def _hold(state: GoalState, number: int, dt_s: float) -> tuple[int, GoalState]:
    """Return the highest number in the last `HOLD_S` seconds that was needed for at least `SURE_S` seconds."""
    needed = (*_newer(state.needed, dt_s, SURE_S, lambda earlier: earlier < number), (0.0, number))
    sure = needed[0][1]
    held = (*_newer(state.held, dt_s, HOLD_S, lambda earlier: earlier > sure), (0.0, sure))
    return held[0][1], replace(state, needed=needed, held=held)


def _newer(
    aged: tuple[tuple[float, int], ...], dt_s: float, most_s: float, kept: Callable[[int], bool]
) -> tuple[tuple[float, int], ...]:
    """Return the ages and numbers after `dt_s` seconds, without those that are too old or that `kept` rejects."""
    return tuple((age_s + dt_s, number) for age_s, number in aged if age_s + dt_s <= most_s and kept(number))

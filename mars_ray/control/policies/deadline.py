"""The policy `deadline`: the highest threshold at which a batch job is expected to end in time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mars_ray.control.cluster_load import BatchJobState, ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.policy import Bounds, Decision, Policy
from mars_ray.control.replica_speed import ReplicaSpeed

LEVEL = 0.005
"""Distance between neighbouring thresholds from which the policy chooses."""
BAND = 0.02
"""Spare speed, as a share of the required speed, that must be available before a threshold rises."""
HALF_LIFE = 0.1
HALF_LIFE_S = 10.0
"""Half-life of measurements: the share `HALF_LIFE` of the time left, but at least `HALF_LIFE_S` seconds."""
GUESS = 0.01
"""Weight of the prediction: it counts like a measurement that lasted this share of the time left."""
SURE = 0.03
LATE = 0.05
"""A late end is reported once speed has been measured for the share `SURE` of the time left, and only if the delay
exceeds the share `LATE` of the total time."""
LEAST = 0.001
"""Minimum speed assumed, as a share of the predicted speed, because stalled workers are expected to resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineState:
    """Measured and predicted speed of a job, as weighted sums in which older seconds count less."""

    measured_s: float | None = None
    """Seconds for which speed was measured; None before the first decision."""
    predicted_s: float = 0.0
    """Seconds that the tokens generated during `measured_s` were predicted to take."""
    total_s: float = 0.0
    """Longest time in seconds that was ever left until the deadline."""
    late_s: float = 0.0
    """Seconds by which the job is expected to miss its deadline even at the fastest threshold; 0 if it can end in
    time."""


def decide_by_deadline(
    plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], state: DeadlineState, dt_s: float
) -> tuple[dict[str, Decision], DeadlineState]:
    """Take the highest threshold at which a batch job ends in time, judging by the speed measured so far.

    First estimates may be wrong: the predicted speed is corrected by the measured one, and the estimate of the
    remaining work grows if rows turn out longer than expected.
    """
    job = load.job
    speed = load.speed
    if job is None or job.backlog.seconds is None or speed is None:
        reason = "no deadline or no speed known yet"
        return {name: Decision(bound.ceiling, reason) for name, bound in bounds.items()}, state
    tokens = job.backlog.tokens
    left_s = job.backlog.seconds
    state = _learn(load, job, speed, state, max(left_s, 0.0), dt_s)
    assert state.measured_s is not None
    replicas = load.replicas * state.predicted_s / state.measured_s
    levels = _levels(speed, bounds)
    fastest = levels[-1]

    def highest(tokens_s: float) -> float:
        return next((level for level in levels if replicas * speed.max_tokens_s(level) >= tokens_s), fastest)

    reserve_s = plan.settings.headroom * state.total_s
    needed = tokens / max(left_s - reserve_s, left_s / 2, 1.0)
    level = min(max(job.threshold, highest(needed * (1 + BAND))), highest(needed))
    reason = f"{needed:.0f} of {replicas * speed.max_tokens_s(level):.0f} tokens/s at {level:.3g} are needed"
    late_s = tokens / (replicas * speed.max_tokens_s(fastest)) - left_s
    if state.measured_s < SURE * left_s or late_s <= (0 if state.late_s else LATE * state.total_s):
        late_s = 0.0
    else:
        reason = f"even at {fastest:.3g} the job ends {late_s:.0f} s after its deadline"
    decisions = {
        name: Decision(min(max(level, bound.floor), bound.ceiling), reason, late_s) for name, bound in bounds.items()
    }
    return decisions, replace(state, late_s=late_s)


DEADLINE = Policy(decide_by_deadline, initial=DeadlineState(), uniform=True)


def _levels(speed: ReplicaSpeed, bounds: Mapping[str, Bounds]) -> list[float]:
    """Return the thresholds to choose from, each faster than the one before."""
    floor = min(bound.floor for bound in bounds.values())
    ceiling = max(bound.ceiling for bound in bounds.values())
    levels = list[float]()
    for level in np.linspace(ceiling, floor, 1 + math.ceil((ceiling - floor) / LEVEL)).tolist():
        # Threshold 1 may be faster than the thresholds just below it.
        if not levels or speed.max_tokens_s(level) > speed.max_tokens_s(levels[-1]):
            levels.append(level)
    return levels


def _learn(
    load: ClusterLoad, job: BatchJobState, speed: ReplicaSpeed, state: DeadlineState, left_s: float, dt_s: float
) -> DeadlineState:
    """Return the state updated with the speed observed over the last `dt_s` seconds."""
    measured_s = state.measured_s
    predicted_s = state.predicted_s
    if measured_s is None:
        measured_s = predicted_s = GUESS * max(left_s, 1.0)
    running = round(sum(demand.running for demand in load.classes) / load.replicas)
    if job.tokens_s is not None and running:
        predicted = load.replicas * float(speed.rates(job.threshold)[min(running, speed.rows) - 1])
        keep = 0.5 ** (dt_s / max(HALF_LIFE * left_s, HALF_LIFE_S))
        measured_s = keep * measured_s + dt_s
        predicted_s = keep * predicted_s + dt_s * job.tokens_s / predicted
    return replace(
        state,
        measured_s=measured_s,
        predicted_s=max(predicted_s, LEAST * measured_s),
        total_s=max(left_s, state.total_s),
    )

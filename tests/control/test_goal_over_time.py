"""The number of replicas over hours: bursts do not make it oscillate, and the promise is kept with few replicas."""

import pytest

from tests.control.control_samples import plan_of
from tests.control.queue_cluster import SCALING, Load, Outcome, QueueCluster, bursts, sine, step

PROMISE_S = 0.2
GOAL, DEMAND = plan_of(slo={"ttft_ms": 1000 * PROMISE_S}), plan_of()
BEST = 5
"""Smallest constant number of replicas that keeps the promise for 95 of 100 requests under each load."""
LOADS: dict[str, Load] = {"step": step, "bursts of a minute": bursts(120), "sine of ten minutes": sine(600)}


def followed(load: Load, seconds: int = 2400, **options: int) -> Outcome:
    return QueueCluster(load, GOAL, 2, SCALING, **options).run(seconds, warm_s=1200)


@pytest.mark.parametrize("name", LOADS)
def test_the_promise_is_kept_without_oscillation_and_with_no_more_replicas_than_the_best_constant(name: str) -> None:
    outcome = followed(LOADS[name])
    assert outcome.within(PROMISE_S) >= 0.94
    assert outcome.mean <= BEST
    assert max(outcome.replicas) <= BEST + 1
    assert outcome.changes_per_hour <= 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("load", [step, *map(bursts, (60, 120, 240, 480)), *map(sine, (600, 1800))])
def test_over_hours_the_goal_beats_the_demand_alone_and_needs_no_more_than_a_constant(load: Load, seed: int) -> None:
    outcomes = {
        "goal": QueueCluster(load, GOAL, 2, SCALING, seed).run(7200, warm_s=1800),
        "demand": QueueCluster(load, DEMAND, 2, SCALING, seed).run(7200, warm_s=1800),
        "constant": QueueCluster(load, GOAL, BEST, None, seed).run(7200, warm_s=1800),
        "fewer": QueueCluster(load, GOAL, BEST - 1, None, seed).run(7200, warm_s=1800),
    }
    for name, outcome in outcomes.items():
        print(
            f"{name:8} {outcome.within(PROMISE_S):.3f} in time, {outcome.mean:.2f} replicas, at most "
            f"{max(outcome.replicas)}, {outcome.changes_per_hour:.1f} changes per hour"
        )
    goal = outcomes["goal"]
    assert goal.within(PROMISE_S) >= 0.95
    assert goal.within(PROMISE_S) > outcomes["demand"].within(PROMISE_S)
    assert outcomes["fewer"].within(PROMISE_S) < 0.96
    assert goal.mean <= BEST + 0.2
    assert goal.changes_per_hour <= 12

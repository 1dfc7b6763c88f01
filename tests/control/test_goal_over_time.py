"""The number of replicas over hours: bursts do not make it oscillate, and the promise is kept with few replicas."""

from statistics import mean

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
@pytest.mark.timeout(900)
@pytest.mark.parametrize("load", [step, *map(bursts, (60, 120, 240, 480)), *map(sine, (600, 1800))])
def test_over_hours_the_goal_beats_the_demand_alone_and_needs_no_more_than_a_constant(load: Load) -> None:
    """Means over four seeds."""
    found = {}
    for name, plan, replicas, scaling in (
        ("goal", GOAL, 2, SCALING),
        ("demand", DEMAND, 2, SCALING),
        ("constant", GOAL, BEST, None),
        ("fewer", GOAL, BEST - 1, None),
    ):
        outcomes = [QueueCluster(load, plan, replicas, scaling, seed).run(7200, warm_s=1800) for seed in range(4)]
        found[name] = (
            mean(outcome.within(PROMISE_S) for outcome in outcomes),
            mean(outcome.mean for outcome in outcomes),
            mean(outcome.changes_per_hour for outcome in outcomes),
        )
        print(name, *(f"{figure:.3f}" for figure in found[name]), "at most", max(max(o.replicas) for o in outcomes))
    in_time, mean_replicas, changes = found["goal"]
    assert in_time >= 0.95
    assert in_time > found["demand"][0]
    assert found["fewer"][0] < 0.96
    assert mean_replicas <= BEST + 0.1
    assert changes <= 12

"""The number of replicas follows the demand and the promised latency: once, and not back and forth."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.core.replica_goal import (
    DRAIN_S,
    HOLD_S,
    LEAST_USED,
    MOST_USED,
    ROOMY_S,
    SHORT_S,
    SURE_S,
    WELL_USED,
    GoalState,
    desired_replicas,
)
from tests.control.control_samples import load_of, plan_of, requests_at, wanted

PLAN = plan_of(slo={"ttft_ms": 500})


class Goal:
    """Decides once a second on replicas that a demand uses at a share, with a p95 as a share of the promise."""

    def __init__(self) -> None:
        self.state = GoalState()

    def run(self, seconds: float, share: float, replicas: int, latency: float, *, lowered: bool = False) -> int:
        load = load_of(wanted(requests_s=requests_at(share)), replicas=replicas, ttft_p95_s=0.5 * latency)
        for _ in range(int(seconds)):
            desired, self.state = desired_replicas(PLAN, load, self.state, 1.0, lowered=lowered)
        return desired


def test_without_a_promise_the_number_is_that_of_the_demand() -> None:
    load = load_of(wanted(requests_s=requests_at(3.0)), replicas=4, ttft_p95_s=99.0)
    state = GoalState()
    for _ in range(100):
        desired, state = desired_replicas(plan_of(), load, state, 1.0, lowered=True)
    assert (desired, state) == (4, GoalState())


@pytest.mark.parametrize(("latency", "lowered"), [(1.5, False), (0.7, True)], ids=["missed", "kept by quality"])
def test_a_promise_that_is_missed_or_kept_by_lower_thresholds_wants_more_replicas_once(
    latency: float, lowered: bool
) -> None:
    goal = Goal()
    assert goal.run(SHORT_S - 1, 2.2, 3, latency, lowered=lowered) == 3
    more = goal.run(SURE_S + 1, 2.2, 3, latency, lowered=lowered)
    assert more in (4, 5)
    assert goal.run(600, 2.2, 3, latency, lowered=lowered) == more, "the new ones are still starting"
    assert goal.run(600, 2.2, more, 0.8) == more


def test_a_shortage_that_the_demand_explains_teaches_nothing() -> None:
    goal = Goal()
    assert goal.run(600, 4.0, 2, 9.0, lowered=True) == 5
    assert goal.state.well_used == WELL_USED


def test_a_miss_that_is_shorter_than_its_pause_wants_nothing() -> None:
    goal = Goal()
    for _ in range(20):
        goal.run(10, 2.2, 3, 2.0)
        assert goal.run(25, 2.2, 3, 0.8) == 3


def test_room_takes_replicas_away_and_a_number_that_failed_is_tried_later_each_time() -> None:
    goal = Goal()
    more = goal.run(SHORT_S + SURE_S, 2.2, 3, 1.5)
    for misses in range(1, 4):
        assert goal.state.patience_s == ROOMY_S * 2**misses
        waited = next(second for second in range(9999) if goal.run(1, 2.2, more, 0.3) < more)
        assert waited >= goal.state.patience_s
        more = next(again for _ in range(999) if (again := goal.run(1, 2.2, more - 1, 1.3)) >= more)


def test_a_promise_that_is_kept_with_room_needs_fewer_replicas_than_the_demand_alone() -> None:
    goal = Goal()
    assert goal.run(SURE_S, 2.6, 4, 0.3) == 4
    assert goal.run(10 * ROOMY_S, 2.6, 4, 0.3) == 3
    assert goal.state.well_used == MOST_USED
    assert goal.run(10 * ROOMY_S, 2.6, 3, 0.3) == 3


def test_little_load_does_not_show_that_more_would_fit() -> None:
    goal = Goal()
    goal.run(SHORT_S, 2.2, 3, 1.5)
    learned = goal.state.well_used
    goal.run(10_000, 0.2, 3, 0.1)
    assert goal.state.well_used == learned


def test_a_promise_that_cannot_be_kept_wants_a_bounded_number() -> None:
    goal = Goal()
    replicas = 1
    for _ in range(50):
        replicas = goal.run(SHORT_S + 1, 1.0, replicas, 50.0)
    assert replicas == 1 / LEAST_USED


def test_a_peak_that_is_shorter_than_a_need_must_last_changes_nothing() -> None:
    goal = Goal()
    goal.run(60, 2.0, 3, 0.8)
    for _ in range(9):
        assert goal.run(SURE_S, 5.0, 3, 0.8) == 3
        assert goal.run(1, 2.0, 3, 0.8) == 3
    assert goal.run(SURE_S + 1, 5.0, 3, 0.8) == 7


def test_a_dip_shorter_than_the_hold_changes_nothing() -> None:
    goal = Goal()
    assert goal.run(5, 3.9, 5, 0.8) == 5
    assert goal.run(HOLD_S, 0.5, 5, 0.8) == 5
    assert goal.run(2, 0.5, 5, 0.8) == 1


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 9), st.floats(0, 9), st.booleans(), st.floats(0, 500)), max_size=60
    )
)
def test_whatever_comes_the_number_is_at_least_what_the_demand_needed_for_long_and_the_share_within_its_bounds(
    steps: list[tuple[float, int, float, bool, float]],
) -> None:
    state = GoalState()
    now_s = 0.0
    needed: list[tuple[float, int]] = []
    for share, replicas, latency, lowered, dt_s in steps:
        load = load_of(wanted(requests_s=requests_at(share)), replicas=replicas, ttft_p95_s=latency)
        alone, _ = desired_replicas(plan_of(), load, GoalState(), dt_s, lowered=lowered)
        desired, state = desired_replicas(PLAN, load, state, dt_s, lowered=lowered)
        now_s += dt_s
        needed.append((now_s, ceil((alone - 1) * WELL_USED / MOST_USED)))
        assert desired >= min(number for at_s, number in needed if now_s - at_s <= SURE_S)
        assert LEAST_USED <= state.well_used <= MOST_USED
        assert len(state.held) <= len(steps)


def test_the_queue_of_a_shortage_has_time_to_drain() -> None:
    goal = Goal()
    assert goal.run(60, 3.0, 2, 9.0) == 4
    assert goal.run(DRAIN_S + SHORT_S - 1, 3.0, 4, 2.0) == 4
    assert goal.state.well_used == WELL_USED
    assert goal.run(SURE_S + 1, 3.0, 4, 2.0) > 4

"""Batch jobs against their deadlines: the policy itself, and whole jobs whose first estimates are wrong."""

import math
import random
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.cluster_load import Backlog, BatchJobState, ClusterLoad
from mars_ray.control.policies.deadline import DEADLINE, DeadlineState
from mars_ray.control.policies.policy import Decision, bounds_of
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import ReportError
from tests.control.control_samples import SPEED, load_of, plan_of, wanted
from tests.control.job_samples import CEILING, DEADLINE_S, FLOOR, Run, Truth, run_job
from tests.samples import seeds

PLAN = plan_of(ServiceClass(floor=FLOOR), ceiling=CEILING, policy="deadline")
BOUNDS = bounds_of(PLAN, [])
GAIN = SPEED.max_tokens_s(FLOOR) / SPEED.max_tokens_s(CEILING)
"""As many times as fast is the floor."""


def load_at(
    tokens: float, seconds: float | None, threshold: float = CEILING, tokens_s: float | None = None
) -> ClusterLoad:
    """One worker with all rows in use, and what is left of the job."""
    job = BatchJobState(backlog=Backlog(tokens=tokens, seconds=seconds), threshold=threshold, tokens_s=tokens_s)
    return load_of(wanted(running=SPEED.rows), job=job)


def decided(
    load: ClusterLoad, state: DeadlineState = DEADLINE.initial, dt_s: float = 1.0
) -> tuple[Decision, DeadlineState]:
    decisions, state = DEADLINE.decide(PLAN, load, BOUNDS, state, dt_s)
    return decisions["standard"], state


PACES = st.builds(
    BatchJobState,
    backlog=st.builds(Backlog, tokens=st.floats(0, 1e12), seconds=st.none() | st.floats(-1e6, 1e7)),
    threshold=st.floats(0, 1),
    tokens_s=st.none() | st.floats(0, 1e9),
)
LOADS = st.builds(
    lambda job, speed, running, replicas: load_of(wanted(running=running), replicas=replicas, speed=speed, job=job),
    st.none() | PACES,
    st.sampled_from([SPEED, SPEED, None]),
    st.integers(0, 20),
    st.integers(1, 4),
)


@given(st.lists(st.tuples(LOADS, st.floats(0, 100)), min_size=1, max_size=6))
def test_whatever_is_told_and_measured_the_answer_is_a_number_within_the_bounds(
    story: list[tuple[ClusterLoad, float]],
) -> None:
    state = DEADLINE.initial
    for load, dt_s in story:
        decision, state = decided(load, state, dt_s)
        assert FLOOR <= decision.threshold <= CEILING and decision.reason
        assert math.isfinite(decision.late_s) and decision.late_s >= 0
        assert all(math.isfinite(each) for each in astuple(state) if each is not None)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(FLOOR, CEILING))
def test_more_to_do_or_less_time_never_raises_the_threshold(
    tokens: float, more: float, seconds: float, less: float, threshold: float
) -> None:
    easier, _ = decided(load_at(tokens, seconds + less, threshold))
    assert decided(load_at(tokens + more, seconds, threshold))[0].threshold <= easier.threshold


def test_nothing_to_do_or_no_deadline_leaves_the_ceiling() -> None:
    for load in (load_at(0, 100), load_at(0, 0), load_at(1e9, None), load_of(wanted(running=4))):
        assert decided(load)[0].threshold == CEILING


def test_before_anything_is_measured_the_estimate_decides() -> None:
    enough = 1000 * SPEED.max_tokens_s(CEILING)
    assert decided(load_at(0.9 * enough, 1000))[0].threshold == CEILING
    assert decided(load_at(1.5 * enough, 1000))[0].threshold == pytest.approx(0.775, abs=0.1)
    assert decided(load_at(3 * enough, 1000))[0].threshold == FLOOR


def test_the_highest_threshold_that_is_fast_enough_is_taken() -> None:
    decision, _ = decided(load_at(1000 * 1.4 * SPEED.max_tokens_s(CEILING), 1000))
    needed = 1.4 * SPEED.max_tokens_s(CEILING) / (1 - PLAN.settings.headroom)
    assert SPEED.max_tokens_s(decision.threshold) >= needed > SPEED.max_tokens_s(decision.threshold + 0.01)


def test_a_threshold_stays_while_it_is_fast_enough_and_no_higher_one_is_by_far() -> None:
    load = load_at(1000 * 1.4 * SPEED.max_tokens_s(CEILING), 1000)
    best = decided(load)[0].threshold
    for threshold in (best, best + 0.005):
        near = load_at(1000 * 1.4 * SPEED.max_tokens_s(CEILING), 1000, threshold)
        assert decided(near)[0].threshold == pytest.approx(best, abs=0.0051)
    slower = load_at(0.995 * 1000 * 1.4 * SPEED.max_tokens_s(CEILING), 1000, best)
    assert decided(slower)[0].threshold == best


def test_a_passed_deadline_means_the_floor_and_says_how_late() -> None:
    decision, _ = decided(load_at(10 * SPEED.max_tokens_s(FLOOR), -20))
    assert decision.threshold == FLOOR and decision.late_s == pytest.approx(30)
    assert decision.reason == "even at 0.5 the job ends 30 s after its deadline"


def test_what_is_measured_outweighs_what_was_predicted() -> None:
    load, state = (
        load_at(1000 * SPEED.max_tokens_s(CEILING) / 2, 1000, tokens_s=SPEED.max_tokens_s(CEILING) / 3),
        DEADLINE.initial,
    )
    assert decided(load)[0].threshold == CEILING
    for _ in range(60):
        decision, state = decided(load, state)
    assert decision.threshold < 0.9


def test_nothing_is_learned_while_nothing_runs() -> None:
    load, state = load_at(1e5, 1000, tokens_s=SPEED.max_tokens_s(CEILING)), DEADLINE.initial
    for _ in range(30):
        _, state = decided(load, state)
    idle = load_of(wanted(running=0), job=load_at(1e5, 1000, tokens_s=0.0).job)
    assert decided(idle, state)[1] == state


@pytest.mark.parametrize(
    ("tokens", "seconds", "message"),
    [
        (-1.0, 1.0, "backlog.tokens is -1.0; it must be a finite number, at least 0."),
        (math.nan, 1.0, "backlog.tokens is nan"),
        (1.0, math.inf, "backlog.seconds is inf; it must be a finite number, or None."),
    ],
)
def test_a_backlog_that_cannot_be_is_refused(tokens: float, seconds: float, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        Backlog(tokens=tokens, seconds=seconds)


# Whole jobs.

FIRST = round(0.1 * DEADLINE_S)
"""Seconds in which a job has to learn what it is."""


def some_job(seed: int) -> Truth:
    chance = random.Random(seed)
    return Truth(
        need=chance.uniform(0.3, 2.5),
        speed=chance.uniform(0.5, 1.5),
        length=chance.uniform(0.5, 1.5),
        drift=chance.choice((1.0, 1.0, chance.uniform(0.5, 1.5))),
        even=chance.random() < 0.3,
        workers=chance.randint(1, 3),
        row_tokens=chance.uniform(20, 250),
        seed=seed,
    )


def said_late(run: Run, truth: Truth) -> bool:
    """Say whether it was known early, counted from what made it late, and remained known."""
    if truth.drift < 1 and any(late == 0 for late in run.late_s[FIRST : DEADLINE_S // 2]):
        return all(run.late_s[DEADLINE_S // 2 + FIRST :])
    return all(run.late_s[FIRST:])


@pytest.mark.parametrize("seed", seeds(40, quick=5))
def test_with_wrong_estimates_a_job_ends_in_time_or_says_early_that_it_cannot(seed: int) -> None:
    truth = some_job(seed)
    run = run_job(truth)
    assert all(FLOOR <= each <= CEILING for each in run.thresholds)
    if run.share > 1.1:
        assert said_late(run, truth)
    elif run.share < 0.9:
        # Nobody knows beforehand that machines will be faster from the middle on.
        settled = run.thresholds[FIRST + (DEADLINE_S // 2 if truth.drift > 1 and run.share > 0.6 else 0) :]
        assert sum(settled) / len(settled) >= CEILING - 0.01


def test_a_job_with_plenty_of_time_stays_at_the_ceiling() -> None:
    run = run_job(Truth(need=0.5, speed=0.8, length=1.1))
    assert set(run.thresholds) == {CEILING} and not any(run.late_s)


def test_a_job_that_cannot_end_in_time_works_at_the_floor_and_says_by_how_much() -> None:
    truth = Truth(need=1.5 * GAIN)
    run = run_job(truth)
    assert set(run.thresholds[5:]) == {FLOOR}
    by_s = (run.share - 1) * DEADLINE_S
    assert all(run.late_s[FIRST:])
    assert all(late == pytest.approx(by_s, rel=0.2) for late in run.late_s[2 * FIRST :])


def test_a_job_whose_estimates_are_right_keeps_one_threshold_for_most_of_its_time() -> None:
    run = run_job(Truth(need=1.5, row_tokens=100, workers=3))
    middle = run.thresholds[FIRST : DEADLINE_S // 2]
    assert max(middle) - min(middle) <= 0.05 and 0.9 <= run.share <= 1.0
    assert run.changes < DEADLINE_S / 10


def test_a_pause_is_made_up_for() -> None:
    yielding = run_job(Truth(need=1.3, paused_s=(100, 150)))
    assert set(yielding.running[110:150]) == {0}
    assert 0.9 <= yielding.share <= 1.1
    assert yielding.thresholds[200] < run_job(Truth(need=1.3)).thresholds[200]

"""Tokens per second against a loop over blocks; load against a loop over rows."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.cluster_load import DRAIN_S, sum_by_class
from mars_ray.control.replica_speed import ReplicaSpeed, speed_of
from mars_ray.engine.stats.grid import GRID
from mars_ray.engine.stats.step_time import StepTime, StepWork
from tests.control.control_samples import (
    PROFILE,
    SPEED,
    STEP_TIME,
    class_state,
    engine_state,
    load_of,
    point,
    profile,
    requests_at,
    wanted,
)

THRESHOLDS = st.sampled_from(GRID) | st.floats(0, 1)


@st.composite
def speeds(draw: st.DrawFn) -> ReplicaSpeed:
    """Any replica whose masks are accepted no less often at lower thresholds."""
    masks = draw(st.integers(0, 4))
    points, least = [], [0.0] * masks
    for threshold in GRID:
        if threshold < 1:
            least = [value + draw(st.floats(0, 0.2)) * (1 - value) for value in least]
        points.append(point(threshold, least))
    parts = {
        name: draw(st.just(0.0) | st.floats(1e-6, 0.01))
        for name in ("seq_s", "position_s", "kv_token_s", "prompt_s", "prompt_token_s", "masks_s")
    }
    step_time = StepTime(fixed_s=draw(st.floats(1e-4, 0.1)), **parts)
    return ReplicaSpeed(draw(st.integers(1, 8)), step_time, tuple(points), draw(st.sampled_from([0.0, 50.0])))


def by_hand(speed: ReplicaSpeed, threshold: float) -> tuple[list[float], list[float]]:
    """Tokens and positions by block, read linearly between two thresholds of the grid; just below 1 nothing is kept."""
    blocks = len(speed.profile[0].tokens)
    none = (1.0, [1.0] * blocks, [1.0 + masks for masks in range(blocks)])
    known = [none, *((each.threshold, list(each.tokens), list(each.positions)) for each in speed.profile[1:])]
    if threshold >= 1:
        return list(speed.profile[0].tokens), list(speed.profile[0].positions)
    if threshold <= known[-1][0]:
        return known[-1][1:]
    for (high, *above), (low, *below) in pairwise(known):
        if low <= threshold <= high:
            part = (high - threshold) / (high - low)
            tokens, positions = (
                [a + part * (b - a) for a, b in zip(one, other, strict=True)]
                for one, other in zip(above, below, strict=True)
            )
            return tokens, positions
    raise AssertionError


def rates_by_hand(speed: ReplicaSpeed, threshold: float) -> list[float]:
    rates = []
    for rows in range(1, speed.rows + 1):
        found = []
        for masks, (tokens, positions) in enumerate(zip(*by_hand(speed, threshold), strict=True)):
            kv_tokens = rows * speed.kv_tokens_per_row
            work = StepWork(num_seqs=rows, positions=rows * positions, kv_tokens=kv_tokens, masks=masks)  # type: ignore[arg-type]
            found.append(rows * tokens / speed.step_time.seconds(work))
        rates.append(max(found))
    return rates


@given(speeds(), THRESHOLDS)
def test_tokens_per_second_are_the_best_over_all_blocks(speed: ReplicaSpeed, threshold: float) -> None:
    wanted_rates = rates_by_hand(speed, threshold)
    assert speed.rates(threshold).tolist() == pytest.approx(wanted_rates)
    assert speed.max_tokens_s(threshold) == pytest.approx(wanted_rates[-1])


@given(speeds(), THRESHOLDS)
def test_more_rows_never_give_fewer_tokens(speed: ReplicaSpeed, threshold: float) -> None:
    rates = speed.rates(threshold)
    assert (rates[1:] >= rates[:-1] * (1 - 1e-9)).all()


@given(speeds(), THRESHOLDS, THRESHOLDS)
def test_a_lower_threshold_is_never_slower(speed: ReplicaSpeed, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert (speed.rates(low) >= speed.rates(high) * (1 - 1e-9)).all()


def test_what_was_returned_before_cannot_be_spoiled_for_the_next() -> None:
    with pytest.raises(ValueError, match="read-only"):
        SPEED.rates(0.9)[0] = 0.0


def test_before_a_replica_measured_its_steps_there_is_no_speed() -> None:
    assert speed_of([]) is None
    assert speed_of([engine_state(step_time=None), engine_state(profile=())]) is None


def test_the_context_of_rows_is_that_of_the_engines_that_have_rows() -> None:
    idle = engine_state(class_state(running=0), kv_tokens=9000)
    found = speed_of([idle, engine_state(class_state(running=1), kv_tokens=100)])
    assert found is not None and found.kv_tokens_per_row == 100


def test_the_speed_of_several_is_that_of_a_typical_one_of_those_that_know_theirs() -> None:
    slow = engine_state(step_time=replace(STEP_TIME, fixed_s=0.06), kv_tokens=300)
    found = speed_of([engine_state(), slow, engine_state(step_time=None)])
    assert found is not None and found.rows == 4
    assert found.step_time.fixed_s == pytest.approx((STEP_TIME.fixed_s + 0.06) / 2)
    assert found.profile[4].tokens == pytest.approx(PROFILE[4].tokens)
    assert speed_of([engine_state(profile=profile(2)), engine_state(profile=profile(3))]) is not None


@given(speeds(), st.floats(0, 300), st.floats(1, 300), st.sampled_from(GRID), st.floats(0.001, 1.0))
def test_a_request_takes_what_it_takes_beside_as_many_as_still_keep_the_time_per_token(
    speed: ReplicaSpeed, prompt: float, answer: float, threshold: float, tpot_s: float
) -> None:
    load = load_of(wanted(prompt_tokens=prompt, output_tokens=answer), speed=speed)
    expected = math.inf
    for rows, rate in enumerate(rates_by_hand(speed, threshold), 1):
        seconds = speed.prompt_seconds(prompt) + answer / rate
        if math.isclose(rows * seconds, tpot_s * answer, rel_tol=1e-9):
            return  # on the edge either answer is right
        # All rows together answer a request in these seconds, so each of them has a token in this time.
        if rows == 1 or rows * seconds <= tpot_s * answer:
            expected = seconds
    assert load.request_seconds("standard", threshold, tpot_s) == pytest.approx(expected)
    assert load.request_seconds("standard", threshold) <= expected * (1 + 1e-9)


@given(st.floats(0, 50), st.floats(0, 50), st.sampled_from(GRID))
def test_a_queue_is_demand_that_should_be_gone_soon(requests_s: float, waiting: float, threshold: float) -> None:
    load = load_of(wanted(requests_s=requests_s, waiting=waiting))
    queued = load_of(wanted(requests_s=waiting / DRAIN_S)).arriving_share("standard", threshold)
    assert load.share_with_queue("standard", threshold) == pytest.approx(
        load.arriving_share("standard", threshold) + queued
    )


def test_a_replica_that_is_asked_for_all_it_can_do_has_a_load_of_one() -> None:
    one = wanted(requests_s=requests_at(1.0))
    seconds = SPEED.prompt_seconds(one.prompt_tokens) + one.output_tokens / SPEED.max_tokens_s(0.95)
    assert one.requests_s * seconds == pytest.approx(1.0)


def test_the_demand_of_several_replicas_is_their_sum_with_sizes_by_weight() -> None:
    heavy = wanted("a", 3.0, output_tokens=100.0, running=2.0, waiting=5.0)
    light = wanted("a", 1.0, output_tokens=20.0, running=1.0)
    (a, b) = sum_by_class([heavy, wanted("b", 7.0), light])
    assert (a.requests_s, a.output_tokens, a.running, a.waiting) == (4.0, 80.0, 3.0, 5.0)
    assert (b.name, b.requests_s) == ("b", 7.0)
    (idle,) = sum_by_class([wanted("a", output_tokens=10.0), wanted("a", output_tokens=30.0)])
    assert idle.output_tokens == 20.0

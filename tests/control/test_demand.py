"""Rates and sizes against the arrivals they were made of."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.demand import JUMP_S, RATE_S, SIZES_S, TOKENS_AT_FIRST, ClassDemand, DemandMeter
from mars_ray.control.replica_messages import ReplicaReport
from tests.control.control_samples import class_state, report

ARRIVALS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 50), st.integers(1, 80)), min_size=2, max_size=90)
"""For each second: sequences that arrive and as many that end, tokens of each one's prompt and answer."""


def reports(arrivals: list[tuple[int, int, int]]) -> list[ReplicaReport]:
    arrived = prompt_tokens = tokens = 0
    made = [report(1, 0.0, class_state())]
    for second, (came, prompt, answer) in enumerate(arrivals, start=1):
        arrived, prompt_tokens, tokens = arrived + came, prompt_tokens + came * prompt, tokens + came * answer
        state = class_state(arrived=arrived, prompt_tokens=prompt_tokens, ended=arrived, tokens=tokens, waiting=came)
        made.append(report(second + 1, float(second), state))
    return made


def metered(made: list[ReplicaReport]) -> DemandMeter:
    meter = DemandMeter(made[0])
    for each in made[1:]:
        assert meter.observe(each)
    return meter


def only(meter: DemandMeter) -> ClassDemand:
    (demand,) = meter.demand()
    return demand


@given(ARRIVALS)
def test_rates_and_sizes_are_those_of_the_last_seconds(arrivals: list[tuple[int, int, int]]) -> None:
    demand = only(metered(reports(arrivals)))
    recent = arrivals[-int(RATE_S) :]
    usual = sum(came for came, _, _ in recent) / len(recent)
    last = [came for came, _, _ in arrivals[-int(JUMP_S) :]]
    jump = (sum(last) - 2 * math.sqrt(sum(last))) / len(last)
    assert demand.requests_s == pytest.approx(max(usual, jump))
    lately = arrivals[-int(SIZES_S) :]
    if not any(came for came, _, _ in lately):
        lately = arrivals  # nothing came lately: the sizes of all that ever did
    if count := sum(came for came, _, _ in lately):
        assert demand.prompt_tokens == pytest.approx(sum(came * prompt for came, prompt, _ in lately) / count)
        assert demand.output_tokens == pytest.approx(sum(came * answer for came, _, answer in lately) / count)
    else:
        assert (demand.prompt_tokens, demand.output_tokens) == (0.0, TOKENS_AT_FIRST)
    assert demand.waiting == arrivals[-1][0]


@given(ARRIVALS, st.integers(0, 1000))
def test_reports_that_come_twice_or_late_change_nothing(arrivals: list[tuple[int, int, int]], seed: int) -> None:
    made, chance = reports(arrivals), random.Random(seed)
    meter, plain = DemandMeter(made[0]), DemandMeter(made[0])
    for number, each in enumerate(made[1:], start=1):
        assert meter.observe(each) and plain.observe(each)
        before = meter.demand()
        assert not meter.observe(made[chance.randint(0, number)])
        assert meter.demand() == before == plain.demand() and meter.last is each


def test_what_a_network_swallowed_is_counted_with_the_next_report() -> None:
    made = reports([(2, 10, 10)] * 30)
    kept = [each for each in made if each.number % 3 == 1]
    assert only(metered(kept)).requests_s == only(metered(made)).requests_s == 2.0


def test_before_a_second_report_there_is_no_rate_but_a_queue() -> None:
    first = only(
        DemandMeter(report(7, 100.0, class_state(arrived=50, prompt_tokens=500, ended=40, tokens=80, waiting=9)))
    )
    assert (first.requests_s, first.waiting) == (0.0, 9)
    assert (first.prompt_tokens, first.output_tokens) == (10, 2)


def test_after_a_clock_was_set_back_only_what_comes_then_counts() -> None:
    meter = metered(reports([(100, 10, 10)] * 20))
    arrived = meter.last.state.classes[0].arrived
    for second in range(6):
        state = class_state(arrived=arrived + 3 * second, prompt_tokens=10 * (arrived + 3 * second))
        assert meter.observe(report(100 + second, float(second), state))
        assert only(meter).requests_s == (3.0 if second else 0.0)


def test_a_counter_that_fell_gives_no_negative_demand() -> None:
    made = [
        report(1, 0.0, class_state(arrived=100, prompt_tokens=900, ended=90, tokens=800)),
        report(2, 1.0, class_state(arrived=3, prompt_tokens=30, ended=2, tokens=20)),
    ]
    demand = only(metered(made))
    assert demand.requests_s == 0.0 and demand.prompt_tokens >= 0 and demand.output_tokens >= 1


def test_prompt_tokens_that_were_found_in_the_cache_are_not_read() -> None:
    made = [
        report(
            second + 1, float(second), class_state(arrived=second, prompt_tokens=80 * second, cached_tokens=76 * second)
        )
        for second in range(20)
    ]
    assert only(metered(made)).prompt_tokens == 4.0


def test_the_sizes_of_requests_are_those_of_the_engine_that_counts_anew() -> None:
    made = reports([(5, 10, 8)] * 30)
    for second in range(3):
        count = 4 * second
        state = class_state(arrived=count, prompt_tokens=10 * count, ended=count, tokens=10 * count)
        made.append(report(32 + second, 31.0 + second, state))
    demand = only(metered(made))
    assert (demand.requests_s, demand.prompt_tokens, demand.output_tokens) == (4.0, 10.0, 10.0)


def test_each_class_is_counted_for_itself() -> None:
    made = [
        report(second + 1, float(second), class_state("a", arrived=second), class_state("b", arrived=5 * second))
        for second in range(10)
    ]
    assert {each.name: each.requests_s for each in metered(made).demand()} == {"a": 1.0, "b": 5.0}


def test_a_class_that_was_not_in_the_first_report_has_no_rate_yet() -> None:
    made = [report(1, 0.0, class_state("a")), report(2, 1.0, class_state("a"), class_state("b", arrived=5))]
    assert {each.name: each.requests_s for each in metered(made).demand()} == {"a": 0.0, "b": 0.0}


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_whatever_the_gaps_between_reports_there_is_a_demand(gaps_s: list[float]) -> None:
    now_s, meter = 0.0, DemandMeter(report(1, 0.0, class_state()))
    for number, gap_s in enumerate(gaps_s, start=2):
        now_s += gap_s
        meter.observe(report(number, now_s, class_state(arrived=number)))
        assert only(meter).requests_s >= 0


def test_a_jump_is_seen_within_two_seconds_and_chance_is_not() -> None:
    calm = metered(reports([(10, 1, 10)] * 10))
    assert only(calm).requests_s == pytest.approx(10)
    jumped = metered(reports([(10, 1, 10)] * 10 + [(60, 1, 10)] * 2))
    assert only(jumped).requests_s == pytest.approx((120 - 2 * math.sqrt(120)) / 2)
    wave = metered(reports([(10, 1, 10)] * 10 + [(14, 1, 10), (13, 1, 10)]))
    assert only(wave).requests_s == pytest.approx((6 * 10 + 27) / 8)


def rows_at_work(seconds: int) -> list[ReplicaReport]:
    """Four rows from second 0 on, begun together, of 60 tokens in 3 seconds each."""
    made = [report(1, 0.0, class_state())]
    for second in range(1, seconds + 1):
        ended = 4 * (second // 3)
        state = class_state(arrived=ended + 4, ended=ended, tokens=60 * ended, running=4)
        made.append(report(second + 1, float(second), state))
    return made


def test_tokens_a_second_are_those_that_were_generated() -> None:
    rates = [metered(rows_at_work(seconds)).tokens_s() for seconds in range(20, 40)]
    assert sum(each for each in rates if each) / len(rates) == pytest.approx(4 * 20, rel=0.05)


def test_tokens_a_second_are_not_known_before_as_many_ended_as_run() -> None:
    assert [metered(rows_at_work(seconds)).tokens_s() for seconds in (0, 1, 2)] == [None] * 3
    # Begun rows count as half done: 4 ended and 4 begun, in 3 seconds.
    assert metered(rows_at_work(3)).tokens_s() == pytest.approx((240 + 120) / 3)


def test_tokens_of_rows_that_end_without_successors_are_counted_once() -> None:
    made = rows_at_work(30)
    last = made[-1].state.classes[0]
    for second in range(31, 45):
        state = class_state(arrived=last.arrived, ended=last.ended + 4, tokens=last.tokens + 240)
        made.append(report(second + 1, float(second), state))
    assert metered(made).tokens_s() == 0.0


def test_the_rate_of_an_engine_that_was_started_again_under_a_name_begins_with_its_own_reports() -> None:
    made = [*rows_at_work(30), report(32, 31.0, class_state(ended=1, tokens=5))]
    assert metered(made).tokens_s() is None
    made.append(report(33, 33.0, class_state(ended=3, tokens=15)))
    assert metered(made).tokens_s() == 5.0

"""The price of a million tokens: now, and as expected at each threshold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.core.controller import Controller
from mars_ray.control.replica_messages import ReplicaReport
from mars_ray.errors import ReportError
from tests.control.control_samples import class_state, engine_state, load_of, plan_of, requests_at, wanted

TOKENS_S = 60
"""Tokens per second of each replica in `controlled`."""


def controlled(*prices: float | None, tokens_s: int = TOKENS_S) -> Controller:
    """Return a controller with one replica for each price, after 20 seconds."""
    controller = Controller(plan_of(), clock=lambda: 0.0)
    for number in range(20):
        for replica, price in enumerate(prices):
            state = engine_state(class_state(arrived=number, ended=number, tokens=tokens_s * number))
            controller.handle_report(
                ReplicaReport(
                    replica=str(replica), number=number, seconds=float(number), state=state, price_per_hour=price
                )
            )
    return controller


def test_the_price_now_is_that_of_all_replicas_for_the_tokens_they_generate() -> None:
    status = controlled(3.0, 1.5).status()
    assert status.price_per_hour == 4.5
    assert status.price_per_million_tokens == pytest.approx(4.5 / (2 * TOKENS_S * 3600 / 1e6))


def test_a_replica_without_a_price_leaves_the_cluster_without_one() -> None:
    status = controlled(3.0, None).status()
    assert (status.price_per_hour, status.price_per_million_tokens) == (None, None)
    assert {point.price_per_million_tokens for point in status.curve} == {None}


def test_without_tokens_there_is_no_price_of_a_token() -> None:
    assert controlled(3.0, tokens_s=0).status().price_per_million_tokens is None


def test_without_replicas_there_is_no_price() -> None:
    assert controlled().status().price_per_hour is None


def test_replicas_that_cost_nothing_make_tokens_that_cost_nothing() -> None:
    assert controlled(0.0).status().price_per_million_tokens == 0


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf"), "3"])
def test_a_report_with_an_impossible_price_is_refused_with_its_value(price: float) -> None:
    with pytest.raises(ReportError, match=rf"report\.price_per_hour is '?{price}'?; it must be"):
        controlled(price)


def test_while_demand_fits_every_threshold_generates_what_is_asked_for() -> None:
    load = load_of(wanted(requests_s=requests_at(0.9), output_tokens=64.0))
    assert load.expected_tokens_s(0.95) == load.expected_tokens_s(0.5) == requests_at(0.9) * 64


@given(st.floats(1.0, 50.0), st.integers(1, 8), st.floats(0.5, 0.95), st.floats(0, 2000))
def test_above_the_capacity_replicas_generate_what_they_have_time_for(
    overload: float, replicas: int, threshold: float, prompt_tokens: float
) -> None:
    one = wanted(requests_s=1.0, prompt_tokens=prompt_tokens)
    request_s = load_of(one).request_seconds(one.name, threshold)
    demand = wanted(requests_s=replicas * overload / request_s, prompt_tokens=prompt_tokens)
    expected = load_of(demand, replicas=replicas).expected_tokens_s(threshold)
    assert expected == pytest.approx(replicas * one.output_tokens / request_s)


def test_waiting_requests_are_tokens_that_are_asked_for() -> None:
    idle = load_of(wanted(requests_s=0.01), replicas=100)
    queued = load_of(wanted(requests_s=0.01, waiting=4), replicas=100)
    assert queued.expected_tokens_s(0.95) > 100 * idle.expected_tokens_s(0.95)


def test_in_overload_the_expected_price_falls_with_the_threshold() -> None:
    controller = controlled(3.0, tokens_s=10_000)
    points = controller.status().curve
    prices = [point.price_per_million_tokens for point in points if point.price_per_million_tokens is not None]
    assert len(prices) == len(points)
    assert prices == sorted(prices, reverse=True) and prices[0] > prices[-1]

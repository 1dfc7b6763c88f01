"""Refused callers wait about as long as requests take; requests go where their beginning lies, unless it is crowded."""

import math
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mars_ray.engine.request import Request
from mars_ray.serve.middleware.admission import LONGEST_S, RetryAfter
from mars_ray.serve.replicas.prefix_routing import PREFIX_TOKENS, SLACK, prefix_keys, ranked

KEYS = st.lists(st.text(max_size=8), min_size=1, max_size=2)
LOADS = st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 20), min_size=1, max_size=8)


@given(KEYS, LOADS)
def test_every_replica_is_ranked_once(keys: list[str], loads: dict[str, int]) -> None:
    assert sorted(ranked(keys, loads)) == sorted(loads)


@given(KEYS, LOADS, st.integers(0, 20))
def test_the_best_is_never_much_busier_than_the_least_loaded(
    keys: list[str], loads: dict[str, int], slack: int
) -> None:
    best, *others = ranked(keys, loads, slack)
    assert loads[best] <= min(loads.values()) + slack
    assert [loads[other] for other in others] == sorted(loads[other] for other in others), "then the least loaded"


@given(KEYS, LOADS, st.integers(0, 20))
def test_keys_stay_where_they_are_while_loads_are_much_the_same(
    keys: list[str], loads: dict[str, int], load: int
) -> None:
    even = dict.fromkeys(loads, load)
    uneven = {replica: load + number % (SLACK + 1) for number, replica in enumerate(loads)}
    assert ranked(keys, even)[0] == ranked(keys, uneven)[0] == ranked(keys, dict(reversed(even.items())))[0]


@given(KEYS, LOADS, st.data())
def test_a_replica_that_goes_moves_only_its_own_keys(
    keys: list[str], loads: dict[str, int], data: st.DataObject
) -> None:
    even = dict.fromkeys([*loads, "one more"], 0)
    gone = data.draw(st.sampled_from(sorted(even)))
    before = ranked(keys, even)[0]
    after = ranked(keys, {replica: 0 for replica in even if replica != gone})[0]
    assert after == before or before == gone


def test_keys_spread_over_the_replicas() -> None:
    loads = dict.fromkeys(["a", "b", "c", "d"], 0)
    shares = Counter(ranked([str(number)], loads)[0] for number in range(4000))
    deviation = math.sqrt(4000 / 4 * 3 / 4)
    assert all(abs(share - 1000) < 5 * deviation for share in shares.values())


def test_a_preferred_replica_too_busy_leaves_its_keys_to_the_least_loaded() -> None:
    best = ranked(["k"], {"a": 0, "b": 0})[0]
    other = "b" if best == "a" else "a"
    assert ranked(["k"], {best: SLACK, other: 0}) == [best, other]
    assert ranked(["k"], {best: SLACK + 1, other: 0}) == [other, best]


@given(st.text(max_size=8), st.text(max_size=8), st.integers(2, 8))
def test_what_the_first_key_cannot_place_stays_where_the_second_puts_it(first: str, second: str, replicas: int) -> None:
    loads = dict.fromkeys(map(str, range(replicas)), 0)
    first_best, second_best = (ranked([key], loads)[0] for key in (first, second))
    assume(first_best != second_best)
    loads[first_best] += SLACK + 1
    assert ranked([first, second], loads)[0] == second_best


@given(st.lists(st.integers(0, 9), max_size=2 * PREFIX_TOKENS), st.lists(st.integers(0, 9), max_size=5))
def test_requests_with_the_same_beginning_share_their_first_key_within_a_tenant(
    prompt: list[int], more: list[int]
) -> None:
    def first_key(tokens: tuple[int, ...], tenant: str) -> str:
        return prefix_keys(Request(id="r", prompt=tokens, tenant=tenant, session="s"))[0]

    long = (*prompt, *[0] * PREFIX_TOKENS)
    assert first_key(long, "ada") == first_key((*long[:PREFIX_TOKENS], *more), "ada")
    assert first_key(long, "ada") != first_key(long, "bob")


@given(st.lists(st.floats(0, 1e6)))
def test_a_refused_caller_waits_from_one_second_to_a_minute(seconds: list[float]) -> None:
    wait = RetryAfter()
    for each in seconds:
        wait.observe(each)
        assert 1 <= wait.seconds() <= LONGEST_S


@pytest.mark.parametrize(("takes_s", "waits_s"), [(0.01, 1), (7, 7), (7.2, 8), (1000, LONGEST_S)])
def test_the_wait_becomes_what_a_request_takes(takes_s: float, waits_s: int) -> None:
    wait = RetryAfter()
    for _ in range(500):
        wait.observe(takes_s)
    assert wait.seconds() == waits_s


def test_one_long_request_among_short_ones_changes_little() -> None:
    wait = RetryAfter()
    for _ in range(100):
        wait.observe(1)
    wait.observe(20)
    assert wait.seconds() == 2

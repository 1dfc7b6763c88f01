"""Fast down, slow up, against an obviously right smoother that remembers everything."""

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.core.threshold_setter import Smoother

RECOVER_S = 20.0
AIMS = st.lists(st.tuples(st.sampled_from([0.95, 0.9, 0.85, 0.8, 0.5]), st.integers(0, 15)), min_size=1, max_size=40)


def followed(
    start: float, decisions: list[tuple[float, int]], recover_s: float = RECOVER_S
) -> list[tuple[float, float]]:
    """When and at what threshold the smoother was; decisions come with the seconds since the one before."""
    smoother, now_s, found = Smoother(start, 0.0, recover_s), 0.0, []
    for decision, gap_s in decisions:
        now_s += gap_s
        found.append((now_s, smoother.follow(decision, now_s)))
    return found


@given(st.sampled_from([0.95, 0.85, 0.5]), AIMS, st.sampled_from([0.0, 5.0, 20.0]))
def test_it_is_the_least_of_what_pairs_of_aims_allowed_for_so_long(
    start: float, decisions: list[tuple[float, int]], recover_s: float
) -> None:
    values = [start] + [decision for decision, _ in decisions]
    allowed = [(0.0, start)]
    for number, (now_s, found) in enumerate(followed(start, decisions, recover_s)):
        allowed.append((now_s, max(values[number], values[number + 1])))
        assert found == min(value for then_s, value in allowed if now_s - then_s <= recover_s)


@given(st.floats(0, 1), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30)), min_size=1, max_size=30))
def test_it_stays_between_the_least_and_the_highest_aim(start: float, decisions: list[tuple[float, int]]) -> None:
    values = [start] + [decision for decision, _ in decisions]
    assert all(min(values) <= found <= max(values) for _, found in followed(start, decisions))


@given(AIMS, st.sampled_from([0.5, 0.8]))
def test_it_has_fallen_after_two_low_aims_whatever_was_before(decisions: list[tuple[float, int]], low: float) -> None:
    assert followed(0.95, [*decisions, (low, 1), (low, 1)])[-1][1] <= low


def test_one_low_aim_alone_lowers_nothing() -> None:
    decisions = [(0.95, 1)] * 5 + [(0.5, 1)] + [(0.95, 1)] * 30 + [(0.5, 1), (0.95, 1)]
    assert {found for _, found in followed(0.95, decisions)} == {0.95}


def test_it_does_not_rise_before_load_allowed_it_for_so_long_and_then_does() -> None:
    found = followed(0.95, [(0.5, 1)] * 10 + [(0.95, 1)] * 40)
    last_low = max(now_s for now_s, threshold in found if threshold == 0.5)
    # The tenth second was the last low one; what it allowed counts for 20 s.
    assert last_low == 10 + RECOVER_S
    assert all(threshold == 0.95 for now_s, threshold in found if now_s > last_low)


def test_it_rises_to_the_least_of_what_was_allowed_not_to_the_last_aim() -> None:
    found = followed(0.95, [(0.5, 1)] * 3 + [(0.8, 1)] * 3 + [(0.95, 1)] * 60)
    assert [value for number, (_, value) in enumerate(found) if not number or value != found[number - 1][1]] == [
        0.95,
        0.5,
        0.8,
        0.95,
    ]

"""The live profile against plain loops over everything that was observed."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mars_ray.engine.stats.grid import GRID, HALF_LIFE
from mars_ray.engine.stats.mask_readings import CALIBRATED_FORWARDS
from mars_ray.engine.stats.profile import FOLD_FORWARDS, Profile
from mars_ray.engine.stats.verified_drafts import VerifiedDrafts
from mars_ray.method.drafts import PositionPrice

BLOCK = 5
NO_DRAFTS = PositionPrice(1.0)
"""A price that no draft pays."""
FORWARDS = st.lists(
    st.integers(0, 7).flatmap(
        lambda looked: st.tuples(
            st.just(looked), st.lists(st.one_of(st.floats(0, 1), st.sampled_from(GRID)), max_size=looked)
        )
    ),
    min_size=1,
    max_size=20,
)
AUDITS = st.lists(
    st.tuples(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.lists(st.booleans(), min_size=1, max_size=4)),
    min_size=1,
    max_size=10,
)


def filled(forwards: list[tuple[int, list[float]]]) -> Profile:
    profile = Profile(BLOCK)
    for looked, confidences in forwards:
        profile.observe_masks(looked, list(confidences), NO_DRAFTS)
    profile.points()  # folds
    return profile


def survival(profile: Profile, threshold: float) -> NDArray[np.float64]:
    """The share of forwards that accepts each mask."""
    return np.diff(profile.lookahead(threshold).tokens_B)


def tokens_per_forward(profile: Profile, threshold: float) -> float:
    profile.points()  # folds
    return float(profile.lookahead(threshold).tokens_B[-1])


def survival_by_hand(forwards: list[tuple[int, list[float]]], threshold: float) -> list[float]:
    """Of the forwards that looked at a mask, the share that accepts it and all before it."""
    shares = []
    for mask in range(BLOCK - 1):
        looked = [sure for count, sure in forwards if count > mask]
        accepted = [
            len(sure) > mask and threshold < 1 and all(each >= threshold for each in sure[: mask + 1])
            for sure in looked
        ]
        shares.append(sum(accepted) / len(looked) if looked else 0.0)
    return shares


@given(FORWARDS, st.sampled_from(GRID))
def test_at_the_thresholds_of_the_grid_survival_is_what_loops_count(
    forwards: list[tuple[int, list[float]]], threshold: float
) -> None:
    profile = filled(forwards)
    assert survival(profile, threshold).tolist() == pytest.approx(survival_by_hand(forwards, threshold), abs=1e-6)
    wanted = 1 + sum(survival_by_hand(forwards, threshold))
    assert tokens_per_forward(profile, threshold) == pytest.approx(wanted, abs=1e-6)


@given(FORWARDS, st.integers(0, len(GRID) - 2), st.floats(0, 1))
def test_between_the_thresholds_of_the_grid_survival_is_a_straight_line(
    forwards: list[tuple[int, list[float]]], number: int, share: float
) -> None:
    profile = filled(forwards)
    high, low = GRID[number], GRID[number + 1]
    above, below = survival(profile, high), survival(profile, low)
    assert survival(profile, high - share * (high - low)) == pytest.approx(above + share * (below - above), abs=1e-6)


@given(FORWARDS, st.floats(0, 1.2), st.floats(0, 1.2))
def test_survival_never_grows_with_the_threshold_nor_from_mask_to_mask_of_full_looks(
    forwards: list[tuple[int, list[float]]], one: float, other: float
) -> None:
    profile = filled([(BLOCK - 1, confidences) for _, confidences in forwards])
    low, high = sorted((one, other))
    assert (survival(profile, low) >= survival(profile, high) - 1e-9).all()
    assert (np.diff(survival(profile, low)) <= 1e-9).all()


def test_at_a_threshold_of_one_tokens_count_that_were_right_when_verified() -> None:
    profile = Profile(BLOCK)
    for number in range(1000):
        profile.observe_masks(4, [1.0] * 4, PositionPrice(0.05))
        profile.observe_drafts([1.0] * 4, [1.0] * 4 if number % 2 else [1.0, 1.0, 0.0])
        profile.observe_rows((0, 0, 0, 0, 4), read=True, surprised=False)
        if number % 2:
            profile.observe_rows((0, 0, 0, 0, 4), read=False, surprised=True)
    # Half of the forwards behind right tokens give 4 drafts that are right, half give 2 and one that is wrong, which
    # voids the masks of one forward.
    assert tokens_per_forward(profile, 1.0) == pytest.approx(1 + 3 / 1.5, rel=0.02)
    assert profile.lookahead(1.0).positions_B[-1] == pytest.approx(1 + 4 / 1.5 + 4, rel=0.02)


def test_tokens_count_as_drafts_if_they_are_worth_the_price_of_their_positions() -> None:
    profile = Profile(BLOCK)
    for _ in range(FOLD_FORWARDS):
        profile.observe_masks(4, [0.9, 0.6, 0.6, 0.6], PositionPrice(0.5, cheap=2))
    assert profile.lookahead(1.0).positions_B[-1] == pytest.approx(1 + 1 + 4, rel=0.01), "the first draft is free"
    assert profile.lookahead(0.9).positions_B[-1] == pytest.approx(1 + 1 + 1 + 4, rel=0.01), "and the first after it"


def test_an_end_in_sight_takes_one_more_forward_where_drafts_are_verified() -> None:
    profile = Profile(BLOCK)
    for _ in range(1000):
        profile.observe_masks(4, [0.9] * 3, PositionPrice(0.05), ends=True)
        profile.observe_drafts([0.9] * 3, [1.0] * 3, ends=True)
    assert tokens_per_forward(profile, 1.0) == pytest.approx((1 + 2 + 1) / 2, rel=0.01)
    assert tokens_per_forward(profile, 0.9) == pytest.approx(4)


def test_an_end_in_sight_that_turns_out_wrong_takes_no_forward_for_its_verification() -> None:
    profile = Profile(BLOCK)
    for number in range(1000):
        right = number % 2
        profile.observe_masks(4, [1.0] * 3, PositionPrice(0.05), ends=True)
        profile.observe_drafts([1.0] * 3, [1.0] * 3 if right else [1.0, 0.0], ends=True)
        profile.observe_rows((0, 0, 0, 4), read=bool(right), surprised=not right)
    # Both ways take two forwards. Four tokens come of right drafts, three of a first draft that is right.
    assert tokens_per_forward(profile, 1.0) == pytest.approx((4 + 3) / 2 / 2, rel=0.01)


def test_masks_that_are_certain_fade_out_towards_a_threshold_of_one() -> None:
    profile = filled([(4, [1.0] * 4)])
    assert survival(profile, 0.995) == pytest.approx([0.5] * 4)


def test_below_the_grid_survival_is_that_of_its_lowest_threshold() -> None:
    profile = filled([(4, [0.03, 0.03, 0.01, 0.01])])
    assert survival(profile, 0.0).tolist() == survival(profile, GRID[-1]).tolist() == [1, 1, 0, 0]


def test_a_sequence_that_would_have_ended_accepts_nothing_behind_its_end() -> None:
    profile = filled([(4, [0.9, 0.9])])
    assert survival(profile, 0.5).tolist() == [1, 1, 0, 0]


def test_a_profile_without_masks_or_without_forwards_gives_one_token() -> None:
    alone = Profile(1)
    alone.observe_masks(0, [], NO_DRAFTS)
    assert tokens_per_forward(alone, 0.5) == tokens_per_forward(Profile(BLOCK), 0.5) == 1
    assert {point.agreement for point in Profile(BLOCK).points()} == {None, 1.0}


@given(FORWARDS, AUDITS)
def test_agreement_and_audited_tokens_are_what_loops_count(
    forwards: list[tuple[int, list[float]]], audits: list[tuple[list[float], list[bool]]]
) -> None:
    profile = filled(forwards)
    for confidences, right in audits:
        profile.observe_audit(0.0, confidences, right)
    judged = [pair for sure, right in audits for pair in zip(accumulate(sure, min), right, strict=False)]
    for point in profile.points():
        accepted = [right for sure, right in judged if sure >= point.threshold]
        assert point.audited == pytest.approx(len(accepted))
        if point.threshold < 1 and accepted:
            # The first token of each forward is autoregressive, so right; of the others so many are.
            ahead = point.tokens_per_forward - 1
            wanted = (1 + ahead * sum(accepted) / len(accepted)) / (1 + ahead)
            assert point.agreement == pytest.approx(wanted)
        else:
            assert point.agreement == (1.0 if point.threshold == 1 else None)


def test_what_was_accepted_at_one_threshold_says_nothing_of_lower_ones() -> None:
    profile = Profile(BLOCK)
    profile.observe_audit(0.9, [0.99, 0.95], [True, True])
    audited = {point.threshold: point.audited for point in profile.points()}
    assert (audited[0.99], audited[0.95], audited[0.9], audited[0.85], audited[0.5]) == (1, 2, 2, 0, 0)


@pytest.mark.parametrize(("confidences", "right"), [([], []), ([0.9], []), ([], [True])])
def test_an_audit_of_nothing_counts_nothing(confidences: list[float], right: list[bool]) -> None:
    profile = Profile(BLOCK)
    profile.observe_audit(0.0, confidences, right)
    assert {point.audited for point in profile.points()} == {0.0}


@given(FORWARDS, st.sets(st.integers(0, 19)))
def test_it_does_not_matter_when_observations_are_folded(
    forwards: list[tuple[int, list[float]]], folds: set[int]
) -> None:
    often = Profile(BLOCK)
    for number, (looked, confidences) in enumerate(forwards):
        often.observe_masks(looked, list(confidences), NO_DRAFTS)
        if number in folds:
            tokens_per_forward(often, 0.5)
    at_once = filled(forwards)
    decay = 1 - 0.5 ** (len(forwards) / HALF_LIFE)
    for threshold in (0.99, 0.9, 0.5, 0.3):
        assert tokens_per_forward(often, threshold) == pytest.approx(
            tokens_per_forward(at_once, threshold), abs=4 * decay
        )


def test_observations_are_folded_after_fewer_forwards_while_little_is_known() -> None:
    profile, folded = Profile(BLOCK), []
    for _ in range(CALIBRATED_FORWARDS + FOLD_FORWARDS):
        folded.append(profile.forwards)
        profile.observe_masks(4, [0.9] * 4, NO_DRAFTS)
    assert folded == [0] * CALIBRATED_FORWARDS + [CALIBRATED_FORWARDS] * FOLD_FORWARDS
    assert profile.forwards == pytest.approx(CALIBRATED_FORWARDS + FOLD_FORWARDS, rel=0.01)


def test_old_observations_fade_by_half_in_a_half_life() -> None:
    profile = Profile(BLOCK)
    for confidence in (0.0, 0.9):
        for _ in range(HALF_LIFE):
            profile.observe_masks(1, [confidence], NO_DRAFTS)
    assert survival(profile, 0.5)[0] == pytest.approx(2 / 3, abs=0.01)


def test_before_anything_is_observed_calibration_says_what_thresholds_give() -> None:
    profile = Profile(8, {1.0: (3.0, 1.0), 0.9: (4.8, 1.0), 0.5: (5.4, 0.9)})
    found = {point.threshold: point for point in profile.points()}
    assert found[1.0].tokens_per_forward == pytest.approx(3.0)
    assert found[0.9].tokens_per_forward == pytest.approx(4.8)
    assert found[0.7].tokens_per_forward == pytest.approx(5.1)
    gains = np.diff(found[0.9].tokens).tolist()
    assert gains == sorted(gains, reverse=True)
    assert found[0.9].agreement is None
    for _ in range(40 * FOLD_FORWARDS):
        profile.observe_masks(7, [0.95, 0.1] + [0.0] * 5, NO_DRAFTS)
    assert tokens_per_forward(profile, 0.9) == pytest.approx(2.0, abs=0.05), "what is observed outweighs it"


def test_what_falls_short_of_a_threshold_counts_as_drafts() -> None:
    profile = Profile(BLOCK)
    for _ in range(FOLD_FORWARDS):
        profile.observe_masks(4, [0.95, 0.6, 0.9, 0.01], PositionPrice(0.05))
        profile.observe_drafts([0.6, 0.9], [1.0, 1.0], after=1)
    points = {point.threshold: point for point in profile.points()}
    # At 0.9 one mask is accepted, and two more give drafts, both of which were right every time.
    assert points[0.9].tokens_per_forward == pytest.approx(4, rel=0.02)
    assert points[0.9].positions[-1] == pytest.approx(4 + 4, rel=0.02)
    assert points[0.5].tokens_per_forward == pytest.approx(4, rel=0.02)


TEXTS = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 8), st.lists(st.floats(0, 1), max_size=4)), min_size=1, max_size=20
)


@given(FORWARDS, TEXTS, st.sampled_from(GRID))
def test_text_gains_its_right_drafts_instead_of_the_drafts_from_masks_that_it_replaced(
    forwards: list[tuple[int, list[float]]], texts: list[tuple[int, int, list[float]]], threshold: float
) -> None:
    without, profile = filled(forwards), filled(forwards)
    for right, wrong, replaced in texts:
        profile.observe_text(right + wrong, right, replaced)
    masks, both = without.lookahead(threshold), profile.lookahead(threshold)
    mean_right = sum(right for right, _, _ in texts) / len(texts)
    mean_drafts = sum(right + wrong for right, wrong, _ in texts) / len(texts)
    replaced_right = sum(sum(accumulate(replaced, lambda a, b: a * b)) for _, _, replaced in texts) / len(texts)
    replaced_drafts = sum(len(replaced) for _, _, replaced in texts) / len(texts)
    assert both.tokens_B[0] - masks.tokens_B[0] == pytest.approx(mean_right, rel=0.05, abs=0.1)
    assert both.positions_B[0] - masks.positions_B[0] == pytest.approx(mean_drafts, rel=0.05, abs=0.1)
    assert (both.tokens_B - masks.tokens_B)[1:] == pytest.approx(mean_right - replaced_right, rel=0.05, abs=0.1)
    assert (both.positions_B - masks.positions_B)[1:] == pytest.approx(mean_drafts - replaced_drafts, rel=0.05, abs=0.1)


JUDGED = st.lists(
    st.lists(st.tuples(st.floats(0, 1), st.one_of(st.floats(0, 1), st.just(1.0))), min_size=1, max_size=4),
    min_size=1,
    max_size=10,
)
"""For each forward, the confidence and the ratio of its drafts."""


@given(JUDGED, st.sampled_from(GRID), st.sampled_from(GRID))
def test_lenience_keeps_drafts_while_their_ratios_reach_the_threshold(
    forwards: list[list[tuple[float, float]]], used: float, asked: float
) -> None:
    drafts = VerifiedDrafts(BLOCK - 1)
    for forward in forwards:
        ratios = [ratio for _, ratio in forward]
        short = next((count for count, ratio in enumerate(ratios, start=1) if ratio < used), len(ratios))
        drafts.observe(0, [sure for sure, _ in forward], ratios[:short], ends=False)
    drafts.fold()
    kept = np.zeros(BLOCK - 1)
    for forward in forwards:
        chance, judged = 1.0, True
        for mask, (sure, ratio) in enumerate(forward):
            chance *= (ratio >= asked) if judged else sure
            judged = judged and ratio >= used
            kept[mask] += chance
    assert drafts.right_GK[GRID.index(asked)] == pytest.approx(kept, abs=1e-9)


def test_with_lenience_sure_masks_are_drafts_at_every_threshold() -> None:
    profile = Profile(BLOCK, lenient=True)
    for _ in range(CALIBRATED_FORWARDS):
        profile.observe_masks(4, [0.9] * 4, PositionPrice(0.01))
        profile.observe_drafts([0.9] * 4, [1.0, 1.0, 0.3])
    high, low = (tokens_per_forward(profile, threshold) for threshold in (0.5, 0.2))
    assert high == tokens_per_forward(profile, 1.0) < low


def test_the_agreement_of_lenience_is_the_share_of_kept_drafts_that_the_model_would_choose() -> None:
    profile = Profile(BLOCK, lenient=True)
    for _ in range(CALIBRATED_FORWARDS):
        profile.observe_masks(4, [0.9] * 4, PositionPrice(0.01))
        profile.observe_drafts([0.9] * 4, [1.0, 0.3, 0.05])
        profile.observe_audit(0.0, [1.0, 0.3, 0.05], [True, False, False])
    by_threshold = {point.threshold: point for point in profile.points()}
    assert by_threshold[0.5].agreement == 1
    tokens = by_threshold[0.2].tokens_per_forward
    assert by_threshold[0.2].agreement == pytest.approx(1 - (tokens - 1) / tokens / 2)

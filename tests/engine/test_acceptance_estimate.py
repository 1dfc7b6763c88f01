"""The estimate of acceptance learns what verification says, follows a change, and stays within bounds."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.drafting.estimate import AcceptanceEstimate

FEATURES = st.lists(st.tuples(st.floats(-30, 30), st.booleans()), max_size=60)


def taught(estimate: AcceptanceEstimate, odds_of: tuple[float, float], drafts: int, seed: int) -> AcceptanceEstimate:
    draw = random.Random(seed)
    for _ in range(drafts):
        feature = draw.uniform(-2, 2)
        right = draw.random() < 1 / (1 + math.exp(-odds_of[0] - odds_of[1] * feature))
        estimate.observe((1.0, feature), right)
    return estimate


def test_it_learns_probabilities_that_depend_on_a_feature() -> None:
    estimate = taught(AcceptanceEstimate((0.0, 0.0)), (0.5, 1.5), drafts=3000, seed=1)
    for feature in (-2.0, 0.0, 2.0):
        assert abs(estimate.probability((1.0, feature)) - 1 / (1 + math.exp(-0.5 - 1.5 * feature))) < 0.06


def test_it_follows_texts_that_change() -> None:
    estimate = taught(AcceptanceEstimate((2.0, 0.0)), (3.0, 0.0), drafts=4000, seed=2)
    estimate = taught(estimate, (-3.0, 0.0), drafts=4000, seed=3)
    assert estimate.probability((1.0, 0.0)) < 0.3


def test_drafts_without_a_feature_make_its_weight_no_less_sure() -> None:
    estimate = AcceptanceEstimate((2.0, -1.0))
    for _ in range(100_000):
        estimate.observe((1.0, 0.0), True)
    estimate.observe((1.0, 1.0), False)
    assert abs(estimate.weights[1] + 1.0) < 0.1


@given(FEATURES)
def test_estimates_are_probabilities_whatever_is_observed(observed: list[tuple[float, bool]]) -> None:
    estimate = AcceptanceEstimate((0.0, 0.0))
    for feature, right in observed:
        estimate.observe((1.0, feature), right)
        assert 0 < estimate.probability((1.0, feature)) < 1

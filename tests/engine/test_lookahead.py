"""What looking ahead gives by block, against plain counting."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.stats.lookahead import Lookahead, autoregressive, interpolate, look_ahead

SHARES = st.lists(st.floats(0, 1), max_size=6)


def accepting(survival: list[float]) -> Lookahead:
    """Tokens at masks are accepted this often, and none is drafted."""
    return look_ahead(np.array(survival), np.zeros(len(survival)), np.zeros(len(survival)))


def falling(shares: list[float]) -> list[float]:
    return sorted(shares, reverse=True)


@given(SHARES)
def test_trusted_tokens_are_fed_again_beside_the_next_masks(shares: list[float]) -> None:
    survival = falling(shares)
    found = accepting(survival)
    for masks in range(len(survival) + 1):
        assert found.tokens_B[masks] == pytest.approx(1 + sum(survival[:masks]))
        assert found.positions_B[masks] == pytest.approx(1 + sum(survival[:masks]) + masks)


@pytest.mark.parametrize("behind_every_draft", [False, True])
@pytest.mark.parametrize("right", [[1.0, 1.0, 1.0], [0.9, 0.7, 0.5], [0.0, 0.5, 0.5], [0.4, 0.4, 0.4]])
def test_verified_tokens_and_positions_are_those_of_counting_forward_by_forward(
    right: list[float], behind_every_draft: bool
) -> None:
    source, forwards, masks, drafts = random.Random(0), 4000, 3, 0
    tokens = positions = rows = 0
    drafted_K, right_K = np.zeros(masks), np.zeros(masks)
    for _ in range(forwards):
        laid = 1 + drafts if behind_every_draft else 1
        agreed = next((k for k in range(drafts) if source.random() >= right[k]), drafts)
        rows, positions, tokens = rows + laid, positions + 1 + drafts + masks * laid, tokens + 1 + agreed
        right_K[:agreed] += 1
        drafts = sum(source.random() < 0.6 for _ in range(masks)) if behind_every_draft or agreed == drafts else 0
        drafted_K[:drafts] += 1
    per_draft = (rows / forwards - 1) / (drafted_K.sum() / forwards)
    found = look_ahead(np.zeros(masks), drafted_K / forwards, right_K / forwards, rows_per_draft=per_draft)
    assert found.tokens_B[-1] == pytest.approx(tokens / forwards)
    assert found.positions_B[-1] == pytest.approx(positions / forwards, rel=1e-3)


@given(SHARES)
def test_drafts_that_are_always_right_give_what_accepting_them_gives(shares: list[float]) -> None:
    drafted = np.array(falling(shares))
    for one, other in zip(look_ahead(0 * drafted, drafted, drafted), accepting(falling(shares)), strict=True):
        assert one == pytest.approx(other)


def test_between_two_thresholds_gain_and_cost_are_interpolated_and_below_the_last_they_stay() -> None:
    top, low = accepting([0.2, 0.0]), accepting([0.6, 0.4])
    known, at = [1.0, 0.9], [top, low].__getitem__
    assert interpolate(known, at, 1.0).tokens_B == pytest.approx([1, 1.2, 1.2])
    assert interpolate(known, at, 0.95).tokens_B == pytest.approx([1, 1.4, 1.6])
    assert interpolate(known, at, 0.9).tokens_B == pytest.approx(low.tokens_B)
    assert interpolate(known, at, 0.2).tokens_B == pytest.approx(low.tokens_B)
    assert autoregressive(3).tokens_B.tolist() == [1, 1, 1]

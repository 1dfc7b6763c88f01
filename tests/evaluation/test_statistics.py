"""Intervals and tests, judged by slower ones that are obviously right."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap

from mars_ray.evaluation.metrics import bootstrap_interval, flipped_signs, mcnemar, mean_and_spread


def test_the_interval_is_that_of_drawing_examples_with_replacement() -> None:
    values = np.array([1] * 70 + [0] * 25 + [-1] * 5, dtype=np.int8)
    slow = bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(1))
    low, high = bootstrap_interval([values])
    assert low == pytest.approx(slow.confidence_interval.low, abs=0.011)
    assert high == pytest.approx(slow.confidence_interval.high, abs=0.011)


def test_groups_count_alike_whatever_their_size() -> None:
    large, small = np.ones(10_000, np.int8), np.zeros(10, np.int8)
    assert bootstrap_interval([large, small]) == (0.5, 0.5)


def test_more_examples_narrow_the_interval() -> None:
    few, many = np.array([0, 1] * 10, np.int8), np.array([0, 1] * 1000, np.int8)
    (low, high), (lower, higher) = bootstrap_interval([many]), bootstrap_interval([few])
    assert lower < low < 0.5 < high < higher
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(2000), rel=0.05)


@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemar_is_a_fair_coin_for_each_pair_that_differs(better: int, worse: int) -> None:
    n, observed = better + worse, math.comb(better + worse, better)
    slow = sum(math.comb(n, k) for k in range(n + 1) if math.comb(n, k) <= observed) / 2**n
    assert mcnemar(better, worse) == pytest.approx(slow)


def changes(better: int, worse: int, same: int) -> np.ndarray:
    return np.array([1] * better + [-1] * worse + [0] * same, np.int8)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 9))
def test_with_one_group_flipped_signs_are_mcnemars_test(better: int, worse: int, same: int) -> None:
    assert flipped_signs([changes(better, worse, same)]) == pytest.approx(mcnemar(better, worse), abs=0.02)


def test_a_group_counts_by_its_mean_and_not_by_how_many_of_its_pairs_differ() -> None:
    small, large = changes(5, 0, 5), changes(0, 40, 360)
    # Half of the small one is better, a tenth of the large one worse: together better, as two coins in a thousand are.
    together = flipped_signs([small, large])
    exact = sum(
        math.comb(5, a) * math.comb(40, b)
        for a in range(6)
        for b in range(41)
        if abs((2 * a - 5) / 10 + (2 * b - 40) / 400) >= 0.4 - 1e-9
    )
    assert together == pytest.approx(exact / 2**45, abs=0.01)


def test_one_sample_has_no_spread() -> None:
    assert mean_and_spread([0.5]) == (0.5, None)
    assert mean_and_spread([0.0, 1.0]) == (0.5, pytest.approx(math.sqrt(0.5)))

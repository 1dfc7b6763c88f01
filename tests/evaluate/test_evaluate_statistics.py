"""Intervals and tests, judged by slower ones that are obviously right."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap

from mars_ray.evaluate.statistics import bootstrap_interval, mcnemar, mean_and_spread


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


def test_one_sample_has_no_spread() -> None:
    assert mean_and_spread([0.5]) == (0.5, None)
    assert mean_and_spread([0.0, 1.0]) == (0.5, pytest.approx(math.sqrt(0.5)))

"""Statistics of right and wrong answers: spreads, intervals and paired tests. None of them assumes a normal
distribution.

Settings are compared with `ar` on the same examples (paired), which finds differences that the intervals of two
separate accuracies would hide.

The bootstrap draws the count of each distinct value from a multinomial distribution. This is equivalent to drawing
examples with replacement, and a thousand times faster.
"""

from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

RESAMPLES = 10_000
SEED = 0
"""Seed of the resampling, so that intervals are reproducible."""
COVERED = 0.95


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation, which is None for a single value."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def bootstrap_interval(groups: Sequence[NDArray[np.int8]]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of the groups' means, with each group resampled separately."""
    rng = np.random.default_rng(SEED)
    means = np.zeros(RESAMPLES)
    for group in groups:
        values, counts = np.unique(group, return_counts=True)
        samples = rng.multinomial(len(group), counts / len(group), size=RESAMPLES)
        means += samples @ values / len(group)
    tail = (1 - COVERED) / 2
    low, high = np.quantile(means / len(groups), [tail, 1 - tail])
    return float(low), float(high)


def mcnemar(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of McNemar's test, from the counts of discordant pairs."""
    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def flipped_signs(groups: Sequence[NDArray[np.int8]]) -> float:
    """Return the two-sided p-value for the mean of the groups' mean changes; a change is -1, 0 or 1.

    This is McNemar's test with equal weights per group. It flips the sign of each change at random, `RESAMPLES` times.
    """
    rng = np.random.default_rng(SEED)
    observed = 0.0
    flipped = np.zeros(RESAMPLES)
    for group in groups:
        differing = int(np.count_nonzero(group))
        observed += group.mean()
        flipped += (2 * rng.binomial(differing, 0.5, RESAMPLES) - differing) / len(group)
    extreme = np.count_nonzero(np.abs(flipped) >= abs(observed) - 1e-9)
    return float((1 + extreme) / (1 + RESAMPLES))

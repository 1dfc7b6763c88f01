"""Statistics of right and wrong answers: spread over seeds, intervals, paired tests, none of them assuming normality.

A bootstrap of n values of which only few differ draws how often each comes, from a multinomial: the same distribution
as drawing n examples with replacement, in a thousandth of the time.
"""

from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

RESAMPLES = 10_000
SEED = 0
"""The same examples have the same interval in every run."""
COVERED = 0.95


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and standard deviation over samples; a single one has no spread."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def bootstrap_interval(groups: Sequence[NDArray[np.int8]]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean over the groups' means; each group is resampled by itself."""
    rng = np.random.default_rng(SEED)
    means = np.zeros(RESAMPLES)
    for group in groups:
        values, counts = np.unique(group, return_counts=True)
        drawn = rng.multinomial(len(group), counts / len(group), size=RESAMPLES)
        means += drawn @ values / len(group)
    tail = (1 - COVERED) / 2
    low, high = np.quantile(means / len(groups), [tail, 1 - tail])
    return float(low), float(high)


def mcnemar(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of McNemar's test, by the pairs of which only one is right."""
    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def flipped_signs(groups: Sequence[NDArray[np.int8]]) -> float:
    """Return the two-sided p-value of the mean over the groups' means, for changes of -1, 0 and 1.

    It is McNemar's test with every group counting alike: of the pairs that differ each is better or worse by the throw
    of a coin, `RESAMPLES` times.
    """
    rng = np.random.default_rng(SEED)
    observed, thrown = 0.0, np.zeros(RESAMPLES)
    for group in groups:
        differing = int(np.count_nonzero(group))
        observed += group.mean()
        thrown += (2 * rng.binomial(differing, 0.5, RESAMPLES) - differing) / len(group)
    as_far = np.count_nonzero(np.abs(thrown) >= abs(observed) - 1e-9)
    return float((1 + as_far) / (1 + RESAMPLES))

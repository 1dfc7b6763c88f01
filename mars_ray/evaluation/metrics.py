"""Compute accuracy, tokens per forward and agreement for each setting and task, with spreads, intervals and p-values.

No statistic assumes a normal distribution. Settings are compared with `ar` on the same examples (paired), which finds
differences that the intervals of two separate accuracies would hide. The bootstrap draws the count of each distinct
value from a multinomial distribution. This is equivalent to drawing examples with replacement, and a thousand times
faster.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from mars_ray.evaluation.results import Metrics, PairedComparison
from mars_ray.evaluation.scorer import Scores, SettingScores
from mars_ray.evaluation.settings import AR

RESAMPLES = 10_000
SEED = 0
"""Seed of the resampling, so that intervals are reproducible."""
COVERED = 0.95
Selection = NDArray[np.bool_]


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


def metrics_of(scores: Scores, setting: str, task: str | None, *, agreement: bool) -> Metrics:
    """Return the metrics of a setting on one task, or on all tasks if `task` is None."""
    numbers = range(len(scores.tasks)) if task is None else [scores.tasks.index(task)]
    in_tasks = [scores.task == number for number in numbers]
    selection: Selection = np.logical_or.reduce(in_tasks)
    seeds = [scores.seed == seed for seed in np.unique(scores.seed[selection])]
    column = scores.settings[setting]
    ar = scores.settings[AR.name]
    low, high = bootstrap_interval([column.right[in_task] for in_task in in_tasks])
    forwards = int(column.forwards[selection].sum())
    return Metrics(
        examples=int(selection.sum()),
        unanswered=int((~column.answered[selection]).sum()),
        right=int(column.right[selection].sum()),
        accuracy=_mean_over_tasks(column.right, in_tasks, selection),
        accuracy_std=_spread(lambda in_seed: _mean_over_tasks(column.right, in_tasks, in_seed), seeds),
        accuracy_low=low,
        accuracy_high=high,
        tokens=int(column.tokens[selection].sum()),
        forwards=forwards,
        tokens_per_forward=_ratio(column.tokens, column.forwards, selection),
        tokens_per_forward_std=_spread(
            lambda in_seed: _ratio(column.tokens, column.forwards, selection & in_seed), seeds
        ),
        agreement=_ratio(column.agreed, column.tokens, selection) if agreement else None,
        agreement_std=_spread(lambda in_seed: _ratio(column.agreed, column.tokens, selection & in_seed), seeds)
        if agreement
        else None,
        same_answers=float((column.answered & (column.key == ar.key))[selection].mean()),
        against_ar=None if setting == AR.name else _paired(column, ar, in_tasks, selection),
    )


def _paired(
    column: SettingScores, ar: SettingScores, in_tasks: Sequence[Selection], selection: Selection
) -> PairedComparison:
    change: NDArray[np.int8] = column.right - ar.right
    changes = [change[in_task] for in_task in in_tasks]
    low, high = bootstrap_interval(changes)
    better = int((change[selection] > 0).sum())
    worse = int((change[selection] < 0).sum())
    return PairedComparison(
        difference=_mean_over_tasks(change, in_tasks, selection),
        low=low,
        high=high,
        better=better,
        worse=worse,
        p_value=mcnemar(better, worse) if len(changes) == 1 else flipped_signs(changes),
    )


def _mean_over_tasks(values: NDArray[np.int8], in_tasks: Sequence[Selection], selection: Selection) -> float:
    selections = [in_task & selection for in_task in in_tasks]
    return float(np.mean([values[examples].mean() for examples in selections if examples.any()]))


def stops_of(scores: Scores, setting: str) -> tuple[int, ...]:
    """Return the number of forwards that gave 1, 2, … tokens, up to the block size."""
    return tuple(scores.stops[setting][gain] for gain in range(1, scores.block + 1))


def _ratio(part: NDArray[np.int64], whole: NDArray[np.int64], selection: Selection) -> float | None:
    total = int(whole[selection].sum())
    return int(part[selection].sum()) / total if total else None


def _spread(figure: Callable[[Selection], float | None], seeds: Sequence[Selection]) -> float | None:
    values = [value for value in map(figure, seeds) if value is not None]
    return mean_and_spread(values)[1] if values else None

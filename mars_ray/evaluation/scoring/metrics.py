"""Compute accuracy, tokens per forward and agreement by setting and task, with spreads, intervals and tests."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mars_ray.evaluation.results import Metrics, PairedComparison
from mars_ray.evaluation.scoring.scores import Scores, SettingScores
from mars_ray.evaluation.scoring.statistics import bootstrap_interval, flipped_signs, mcnemar, mean_and_spread
from mars_ray.evaluation.settings import AR

Where = NDArray[np.bool_]


def metrics_of(scores: Scores, setting: str, task: str | None, *, agreement: bool) -> Metrics:
    """Return the metrics of a setting on one task, or on all if `task` is None."""
    numbers = range(len(scores.tasks)) if task is None else [scores.tasks.index(task)]
    in_tasks = [scores.task == number for number in numbers]
    where: Where = np.logical_or.reduce(in_tasks)
    seeds = [scores.seed == seed for seed in np.unique(scores.seed[where])]
    column = scores.settings[setting]
    ar = scores.settings[AR.name]
    low, high = bootstrap_interval([column.right[in_task] for in_task in in_tasks])
    forwards = int(column.forwards[where].sum())
    return Metrics(
        examples=int(where.sum()),
        unanswered=int((~column.answered[where]).sum()),
        right=int(column.right[where].sum()),
        accuracy=_mean_over_tasks(column.right, in_tasks, where),
        accuracy_std=_spread(lambda of_seed: _mean_over_tasks(column.right, in_tasks, of_seed), seeds),
        accuracy_low=low,
        accuracy_high=high,
        tokens=int(column.tokens[where].sum()),
        forwards=forwards,
        tokens_per_forward=_ratio(column.tokens, column.forwards, where),
        tokens_per_forward_std=_spread(lambda of_seed: _ratio(column.tokens, column.forwards, where & of_seed), seeds),
        agreement=_ratio(column.agreed, column.tokens, where) if agreement else None,
        agreement_std=_spread(lambda of_seed: _ratio(column.agreed, column.tokens, where & of_seed), seeds)
        if agreement
        else None,
        same_answers=float((column.answered & (column.key == ar.key))[where].mean()),
        against_ar=None if setting == AR.name else _paired(column, ar, in_tasks, where),
    )


def _paired(column: SettingScores, ar: SettingScores, in_tasks: Sequence[Where], where: Where) -> PairedComparison:
    change: NDArray[np.int8] = column.right - ar.right
    changes = [change[in_task] for in_task in in_tasks]
    low, high = bootstrap_interval(changes)
    better = int((change[where] > 0).sum())
    worse = int((change[where] < 0).sum())
    return PairedComparison(
        difference=_mean_over_tasks(change, in_tasks, where),
        low=low,
        high=high,
        better=better,
        worse=worse,
        p_value=mcnemar(better, worse) if len(changes) == 1 else flipped_signs(changes),
    )


def _mean_over_tasks(values: NDArray[np.int8], in_tasks: Sequence[Where], where: Where) -> float:
    chosen = [in_task & where for in_task in in_tasks]
    return float(np.mean([values[examples].mean() for examples in chosen if examples.any()]))


def stops_of(scores: Scores, setting: str) -> tuple[int, ...]:
    """Return the number of forwards that gave 1, 2, … tokens, up to the block."""
    return tuple(scores.stops[setting][gain] for gain in range(1, scores.block + 1))


def _ratio(part: NDArray[np.int64], whole: NDArray[np.int64], where: Where) -> float | None:
    total = int(whole[where].sum())
    return int(part[where].sum()) / total if total else None


def _spread(figure: Callable[[Where], float | None], seeds: Sequence[Where]) -> float | None:
    values = [value for value in map(figure, seeds) if value is not None]
    return mean_and_spread(values)[1] if values else None

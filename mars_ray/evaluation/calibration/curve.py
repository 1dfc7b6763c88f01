"""Measure tokens per forward, agreement and accuracy at each threshold, with spreads, and print them as a table."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from mars_ray.adapter.folder import Adapter
from mars_ray.data.tasks import FAMILIES
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.evaluation.calibration.counts import CalibrationCounts, count_answers, total_of
from mars_ray.evaluation.calibration.prompts import CalibrationPrompt
from mars_ray.model.card import CalibrationPoint, FamilyPoint
from mars_ray.model.checkpoint import Checkpoint

CURVE_HEAD = ("threshold", "tokens per forward", "agreement", "accuracy")
_ByFamily = Mapping[str, CalibrationCounts]


def calibration_curve(
    checkpoint: Checkpoint,
    prompts: Sequence[CalibrationPrompt],
    thresholds: Sequence[float],
    sampling: SamplingParams,
    data: str,
    adapter: Adapter | None = None,
) -> tuple[CalibrationPoint, ...]:
    """Return one calibration point per threshold; `data` names the source of the prompts."""
    decodes = [DecodeParams(threshold=threshold) for threshold in thresholds]
    counts = count_answers(checkpoint, prompts, decodes, sampling, adapter)
    return tuple(
        _point(threshold, _samples(prompts, prompt_counts), data)
        for threshold, prompt_counts in zip(thresholds, counts, strict=True)
    )


def _samples(prompts: Sequence[CalibrationPrompt], counts: Sequence[CalibrationCounts]) -> list[_ByFamily]:
    """Return one mapping per sample, from each family to its counts."""
    samples: dict[int, dict[str, list[CalibrationCounts]]] = defaultdict(lambda: defaultdict(list))
    for prompt, count in zip(prompts, counts, strict=True):
        samples[prompt.sample][prompt.example.family if prompt.example else ""].append(count)
    return [{name: total_of(family) for name, family in sample.items()} for sample in samples.values()]


def _point(threshold: float, samples: Sequence[_ByFamily], data: str) -> CalibrationPoint:
    families = [name for name in FAMILIES if any(name in sample for sample in samples)]
    by_family = {name: total_of(sample[name] for sample in samples if name in sample) for name in families or [""]}
    total = total_of(by_family.values())

    def spread(figure: Callable[[_ByFamily], float]) -> float | None:
        return stdev(map(figure, samples)) if len(samples) > 1 else None

    return CalibrationPoint(
        threshold=threshold,
        tokens_per_forward=total.tokens_per_forward,
        tokens_per_forward_std=spread(lambda sample: total_of(sample.values()).tokens_per_forward),
        agreement=total.agreement,
        agreement_std=spread(lambda sample: total_of(sample.values()).agreement),
        accuracy=_accuracy(by_family) if families else None,
        accuracy_std=spread(_accuracy) if families else None,
        examples=total.examples,
        tokens=total.tokens,
        seeds=len(samples),
        data=data,
        by_family={
            name: FamilyPoint(
                examples=by_family[name].examples,
                tokens_per_forward=by_family[name].tokens_per_forward,
                accuracy=by_family[name].accuracy,
            )
            for name in families
        },
    )


def _accuracy(by_family: _ByFamily) -> float:
    """Return the mean accuracy over families."""
    return fmean(count.accuracy for count in by_family.values())


def curve_row(point: CalibrationPoint) -> tuple[str, ...]:
    """Return the cells of one table row, in the order of `CURVE_HEAD`. ± is the standard deviation over samples."""
    return (
        f"{point.threshold:g}",
        f"{point.tokens_per_forward:.2f}{_spread(point.tokens_per_forward_std, '.2f')}",
        f"{point.agreement:.2%}{_spread(point.agreement_std, '.2%')}",
        "-" if point.accuracy is None else f"{point.accuracy:.1%}{_spread(point.accuracy_std, '.1%')}",
    )


def print_curve(points: Sequence[CalibrationPoint], title: str) -> None:
    """Print the points as a table, with the number and source of the examples."""
    point = points[0]
    samples = f"{point.seeds} samples" if point.seeds > 1 else "1 sample, so no spread"
    table = Table(title=title, caption=f"{point.examples} examples of {point.data} in {samples}")
    for name in CURVE_HEAD:
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(*curve_row(point))
    Console().print(table)


def _spread(value: float | None, form: str) -> str:
    return "" if value is None else f" ± {value:{form}}"

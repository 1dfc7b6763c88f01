"""Measure tokens per forward, agreement and accuracy at each threshold, with their spreads."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from mars_ray.adapter.folder import Adapter
from mars_ray.data.tasks import FAMILIES
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.evaluation.calibration.counts import CalibrationCounts, count_answers, total_of
from mars_ray.evaluation.calibration.prompts import CalibrationPrompt
from mars_ray.model.card import CalibrationPoint, FamilyPoint
from mars_ray.model.checkpoint import Checkpoint

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

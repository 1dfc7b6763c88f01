"""Calibrate a model or an adapter from a finished evaluation, whose tasks have right answers."""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from mars_ray.adapter.card import resolve_adapter
from mars_ray.errors import DataError
from mars_ray.evaluation.calibration import without_rounding, writable_card
from mars_ray.evaluation.results import RESULTS_FILE, EvaluationPlan, Metrics, Results, read_model
from mars_ray.evaluation.settings import AR, EXACT, threshold_of
from mars_ray.model.card import CalibrationPoint, FamilyPoint, write_card
from mars_ray.model.digest import folder_digest
from mars_ray.model.resolve import resolve_model
from mars_ray.storage.location import AnyPath


def calibrate_from(
    evaluation: AnyPath, model: str | AnyPath, adapter: str | Path | None = None
) -> tuple[CalibrationPoint, ...]:
    """Replace the calibration in the card of `adapter`, or of the model, by the results in an evaluation's folder.

    Raises an `InputError` if the card cannot be written to, or if the evaluation is of other weights or cannot be a
    calibration.
    """
    folder = resolve_model(model)
    adapter_folder = resolve_adapter(adapter)
    calibrated = adapter_folder or folder
    card = writable_card(calibrated)
    if not (evaluation / RESULTS_FILE).is_file():
        raise DataError(
            f"{evaluation} has no {RESULTS_FILE}. Name the output folder of a finished `mars-ray evaluate`."
        )
    results = read_model(evaluation / RESULTS_FILE, Results)
    digests = (folder_digest(folder), adapter_folder and folder_digest(adapter_folder))
    if digests != (results.plan.model_digest, results.plan.adapter_digest):
        raise DataError(f"{evaluation} is an evaluation of another model or adapter. Name those that it was made with.")
    curve = calibration_of(results)
    write_card(card.model_copy(update={"calibration": curve}), calibrated)
    return curve


def calibration_of(results: Results) -> tuple[CalibrationPoint, ...]:
    """Return one calibration point per threshold; exact mode is threshold 1.

    Raises `DataError` for an evaluation that cannot be a calibration: above temperature 0, with unanswered questions,
    or without exact mode.
    """
    plan = results.plan
    if plan.temperature > 0:
        raise DataError(f"the evaluation was made at temperature {plan.temperature:g}; a calibration needs 0.")
    if EXACT.name not in results.overall:
        raise DataError("the evaluation has no exact mode, to which thresholds are compared; add it to --modes.")
    missing = sum(metrics.unanswered for metrics in results.overall.values())
    if missing:
        raise DataError(f"{missing:,} answers of the evaluation are missing; give its command again.")
    thresholds = {
        1.0 if name == EXACT.name else threshold_of(name): name for name in results.overall if name != AR.name
    }
    points = [_point(results, threshold, name) for threshold, name in sorted(thresholds.items(), reverse=True)]
    # Exact mode drafts from text as well; the thresholds of an evaluation do not. A calibration is about masks, from
    # which a lower threshold gains at least as much.
    return without_rounding([_without_text(points), *points[1:]])


def _without_text(points: Sequence[CalibrationPoint]) -> CalibrationPoint:
    """Return the first point, of exact mode, with the least tokens per forward of any point, also by family."""
    exact = points[0]
    least = min(points, key=attrgetter("tokens_per_forward"))
    families = {
        name: family.model_copy(
            update={"tokens_per_forward": min(point.by_family[name].tokens_per_forward for point in points)}
        )
        for name, family in exact.by_family.items()
    }
    fields = {"tokens_per_forward": least.tokens_per_forward, "tokens_per_forward_std": least.tokens_per_forward_std}
    return exact.model_copy(update=fields | {"by_family": families})


def _point(results: Results, threshold: float, setting: str) -> CalibrationPoint:
    plan = results.plan
    overall = results.overall[setting]
    assert overall.agreement is not None, "the temperature is 0"
    return CalibrationPoint(
        threshold=threshold,
        tokens_per_forward=_per_forward(overall),
        tokens_per_forward_std=overall.tokens_per_forward_std,
        agreement=overall.agreement,
        agreement_std=overall.agreement_std,
        accuracy=overall.accuracy,
        accuracy_std=overall.accuracy_std,
        examples=overall.examples,
        tokens=overall.tokens,
        seeds=plan.seeds,
        data=_data(plan),
        by_family={
            task: FamilyPoint(
                examples=metrics[setting].examples,
                tokens_per_forward=_per_forward(metrics[setting]),
                accuracy=metrics[setting].accuracy,
            )
            for task, metrics in results.tasks.items()
        },
    )


def _per_forward(metrics: Metrics) -> float:
    assert metrics.tokens_per_forward is not None, "every question is answered"
    return metrics.tokens_per_forward


def _data(plan: EvaluationPlan) -> str:
    rounded = f" in {plan.quantize}" if plan.quantize else ""
    return f"{', '.join(plan.tasks)}{rounded}, block {plan.block}"

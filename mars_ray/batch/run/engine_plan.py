"""Plan the engines of a job or stage before any work starts: the options of an engine, its threads and controller."""

from dataclasses import dataclass, replace
from pathlib import Path

from mars_ray.adapter.card import AdapterCard, unnamed
from mars_ray.adapter.decoding_model import DecodingModel
from mars_ray.batch.run.options import WorkerOptions
from mars_ray.control.control_settings import ControlPlan, ControlSettings
from mars_ray.control.policies.policy import bounds_of
from mars_ray.engine.choose_engine import check_engine
from mars_ray.engine.mode import DEFAULT_THRESHOLD, Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.engine.request import DecodeParams
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import ConfigError
from mars_ray.model.card import Card, accuracies, agreements
from mars_ray.model.folder import ResolvedModel
from mars_ray.model.threads import suitable_threads

QUEUE = 1 << 16
"""Maximum number of sequences that wait in an engine, which is more than a worker ever submits."""
REQUEST_TOKENS = 1 << 40
"""Maximum number of tokens that a request may generate, in effect no limit."""
RECOVER = 0.02
"""Time in which lowered thresholds recover, as a fraction of the job's time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Plan of the engines of a job or stage."""

    workers: WorkerOptions
    model: ResolvedModel
    """Model. The path of its folder is absolute, because workers have a different working directory."""
    adapter: Path | None
    """Absolute folder of the adapter, if any."""
    threads: int
    """Number of threads that suits the model on a CPU."""
    control: ControlPlan

    def spec(self, threads: int) -> EngineSpec:
        """Return the engine settings of a worker with this number of threads."""
        return EngineSpec(
            folder=self.model.folder,
            dtype=self.model.dtype.name,
            threads=threads,
            adapters=unnamed(self.adapter),
            options=EngineOptions(
                **self.workers.tuning,
                max_waiting_seqs=QUEUE,
                max_request_tokens=REQUEST_TOKENS,
                threshold=self.control.ceiling,
                classes=self.control.classes,
            ),
        )


def plan_engines(
    model: DecodingModel,
    *,
    workers: WorkerOptions,
    decode: DecodeParams,
    deadline_s: float | None,
    max_quality_loss: float | None,
) -> tuple[EnginePlan, DecodeParams]:
    """Return the plan of the engines, and the decoding parameters for rows that do not set them.

    Raises an `InputError` for an unusable option.
    """
    control, decode = _control(decode, model.card, deadline_s, max_quality_loss)
    check_engine(model.base, workers, unnamed(model.adapter))
    threads = suitable_threads(model.base.parameters.total())
    plan = EnginePlan(workers=workers, model=model.base, adapter=model.adapter, threads=threads, control=control)
    return plan, decode


def _control(
    decode: DecodeParams, card: Card | AdapterCard | None, deadline_s: float | None, max_quality_loss: float | None
) -> tuple[ControlPlan, DecodeParams]:
    """Return the settings of the controller, and the decoding parameters for rows that do not set them.

    The controller sets the threshold only if there is a deadline.
    """
    ceiling = DEFAULT_THRESHOLD if decode.threshold is None else decode.threshold
    plan = batch_plan(card, threshold=ceiling, deadline_s=deadline_s, max_quality_loss=max_quality_loss)
    if deadline_s is None and max_quality_loss is None:
        return plan, replace(decode, threshold=ceiling) if decode.mode is Mode.THRESHOLD else decode
    option = "deadline" if max_quality_loss is None else "max_quality_loss"
    if decode.mode is not Mode.THRESHOLD:
        raise ConfigError(
            f"mode is {decode.mode.value}, in which no threshold applies, so {option} has no effect. Leave one of them "
            "out."
        )
    if card is None or not card.block:
        raise ConfigError(
            f"the model does not look ahead, so no threshold makes it faster, and {option} has no effect. Add an "
            "adapter, or leave the option out."
        )
    [allowed] = bounds_of(plan.model_copy(update={"ceiling": 1.0}), []).values()
    if max_quality_loss is not None and decode.threshold is not None:
        if deadline_s is None:
            raise ConfigError("without a deadline, max_quality_loss sets the threshold. Leave one of them out.")
        if decode.threshold < allowed.floor:
            raise ConfigError(
                f"threshold is {decode.threshold:g}, but max_quality_loss allows {allowed.floor:g} and above, by the "
                "calibration. Raise one of them, or leave one out."
            )
    return plan, replace(decode, threshold=None if deadline_s is not None else allowed.floor)


def batch_plan(
    card: Card | AdapterCard | None, *, threshold: float, deadline_s: float | None, max_quality_loss: float | None
) -> ControlPlan:
    """Return the settings of a job's controller, which keeps `threshold` unless there is a deadline.

    Without `max_quality_loss`, the calibrated bounds apply, or the default floor if the model was never calibrated.
    Raises `ConfigError` for a value out of range, and for a `max_quality_loss` without a calibration.
    """
    if deadline_s is not None and not 0 < deadline_s < float("inf"):
        raise ConfigError(f"deadline is {deadline_s} s, must be more than 0.")
    if max_quality_loss is not None and not 0 <= max_quality_loss <= 1:
        raise ConfigError(f"max_quality_loss is {max_quality_loss}, must be 0 to 1.")
    points = card.calibration if card else ()
    if max_quality_loss is not None and not points:
        raise ConfigError(
            f"max_quality_loss is {max_quality_loss}, but the model has no calibration, which says what a threshold "
            "loses. Run `mars-ray calibrate` first, or leave the limit out."
        )
    accuracy = accuracies(points)
    settings: dict[str, object] = {"policy": "fixed"}
    if deadline_s is not None:
        recover_s = min(ControlSettings().recover_s, RECOVER * deadline_s)
        settings = {"policy": "deadline", "recover_s": recover_s}
    floor = None
    if max_quality_loss is not None:
        settings["max_accuracy_loss"] = max_quality_loss
        if not accuracy:  # count every token that differs from autoregressive decoding as a loss
            settings["min_agreement"] = 1 - max_quality_loss
        floor = min(threshold, *(point.threshold for point in points))
    return ControlPlan(
        settings=ControlSettings.model_validate(settings),
        ceiling=threshold,
        classes=(ServiceClass(floor=floor),),
        agreement=agreements(points),
        accuracy=accuracy,
        lenient=isinstance(card, AdapterCard),
    )

"""What the controller of a batch job goes by: the threshold of the job, its deadline and the quality it may cost.

Thresholds stay above what was calibrated, or above the usual floor for a model that never was.
"""

from mars_ray.adapter.card import AdapterCard
from mars_ray.control.settings import ControlPlan, ControlSettings
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import ConfigError
from mars_ray.model.card import Card

RECOVER = 0.02
"""Share of the time until the deadline in which thresholds come back: sooner in a short job than in a long one."""


def batch_plan(
    card: Card | AdapterCard | None, *, threshold: float, deadline_s: float | None, max_quality_loss: float | None
) -> ControlPlan:
    """Return the plan. Without a deadline the threshold stays; without `max_quality_loss` the usual bounds hold.

    Raises `ConfigError` for a value out of range.
    """
    if deadline_s is not None and not 0 < deadline_s < float("inf"):
        raise ConfigError(f"the deadline is {deadline_s} s from now; it must be more than 0.")
    if max_quality_loss is not None and not 0 <= max_quality_loss <= 1:
        raise ConfigError(f"max_quality_loss is {max_quality_loss}; it must be in 0..1.")
    points = card.calibration if card else ()
    accuracy = tuple((each.threshold, each.accuracy) for each in points if each.accuracy is not None)
    settings: dict[str, object] = {"policy": "fixed"}
    if deadline_s is not None:
        recover_s = min(ControlSettings().recover_s, RECOVER * deadline_s)
        settings = {"policy": "deadline", "recover_s": recover_s}
    floor = None
    if max_quality_loss is not None:
        settings["max_accuracy_loss"] = max_quality_loss
        if not accuracy:  # then what differs from autoregressive decoding counts as lost
            settings["min_agreement"] = 1 - max_quality_loss
        floor = min([threshold, *(each.threshold for each in points)]) if points else None
    return ControlPlan(
        settings=ControlSettings.model_validate(settings),
        ceiling=threshold,
        classes=(ServiceClass(floor=floor),),
        agreement=tuple((each.threshold, each.agreement) for each in points),
        accuracy=accuracy,
    )

"""Settings of the controller.

In:    fields of a config file.
Out:   frozen settings; unknown names and impossible values fail when they are read.
Never: knows a cluster.
"""

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mars_ray.engine.mode import DEFAULT_THRESHOLD
from mars_ray.engine.service_class import ServiceClass

FLOOR = 0.9
"""The floor of classes that name none. Below it a token per forward costs several times the quality (arXiv 2604.07023,
GSM8K)."""

PolicyName = Literal["fixed", "load", "slo", "capacity", "deadline"]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SloSettings(_Settings):
    """Latency targets, in the promise to callers."""

    ttft_ms: float | None = Field(None, gt=0)
    """Milliseconds from arrival to first token, kept for 95 of 100 requests."""
    tpot_ms: float | None = Field(None, gt=0)
    """Milliseconds for each token after the first, kept for 95 of 100."""


class ControlSettings(_Settings):
    """How thresholds follow the load."""

    policy: PolicyName = "capacity"
    """'fixed' never lowers them; 'load' follows how many requests there are, 'slo' the latency that is measured,
    'capacity' what demand takes by the measured speed, 'deadline' what is left of a batch job."""
    slo: SloSettings = SloSettings()
    """Latency that callers were promised, for 'slo' and 'capacity'."""
    headroom: float = Field(0.02, ge=0, lt=1)
    """Share of the replicas' time, or of the time of a batch job, that thresholds keep free."""
    recover_s: float = Field(40.0, ge=0)
    """Seconds for which load must have allowed a higher threshold before it rises."""
    min_agreement: float = Field(0.95, ge=0, le=1)
    """Least share of tokens that are those of autoregressive decoding, by calibration or live audit; a threshold with
    less is never used."""
    max_accuracy_loss: float = Field(0.01, ge=0, le=1)
    """Most right answers that a threshold may lose against threshold 1, by calibration; one that loses more is never
    used. The default is what MLPerf Inference allows a system that is to count as the same model: 99 % of the
    reference's accuracy."""
    in_time_per_accuracy: float = Field(3.0, ge=0)
    """Exchange rate: a percentage point of accuracy is given up only for so many percentage points more of the requests
    in time. 0 gives up accuracy for any gain."""
    lease_s: float = Field(5.0, gt=0)
    """Seconds for which a replica follows a controller that it no longer hears from."""


def interpolate_quality(points: Sequence[tuple[float, float]], threshold: float) -> float:
    """Return a quality at a threshold, read linearly between `points`.

    It never rises as thresholds fall: what was measured otherwise is chance.
    """
    thresholds, values = np.array(sorted(points, reverse=True)).T
    return float(np.interp(-threshold, -thresholds, np.minimum.accumulate(values)))


class ControlPlan(_Settings):
    """Model, settings and calibration: all inputs of the controller except reports."""

    model: str = ""
    """The model: its speed applies to no other."""
    settings: ControlSettings = ControlSettings()
    ceiling: float = Field(DEFAULT_THRESHOLD, ge=0, le=1)
    """The threshold of all classes while there is room; 1 is lossless."""
    classes: tuple[ServiceClass, ...] = (ServiceClass(),)
    agreement: tuple[tuple[float, float], ...] = ()
    """Pairs from calibration: a threshold, and the share of tokens that are those of autoregressive decoding."""
    accuracy: tuple[tuple[float, float], ...] = ()
    """Pairs from calibration: a threshold, and the share of right answers; empty where nothing could be verified."""

    @model_validator(mode="after")
    def _floors_below_the_ceiling(self) -> Self:
        for each in self.classes:
            if each.floor is not None and each.floor > self.ceiling:
                raise ValueError(
                    f"floor of class {each.name} is {each.floor}; it must be from 0 to the threshold, {self.ceiling}"
                )
        return self

    def quality(self, threshold: float) -> float:
        """Return the share of right answers at a threshold by calibration, of tokens that agree where there is none."""
        known = self.accuracy or self.agreement
        return interpolate_quality(known, threshold) if known else 1.0

    def floor(self, name: str) -> float:
        """Return the least threshold of a class."""
        floor = next(each.floor for each in self.classes if each.name == name)
        return min(FLOOR, self.ceiling) if floor is None else floor

"""Settings of the controller.

In:    fields of a config file.
Out:   frozen settings; unknown names and impossible values raise an error when the settings are read.
Never: depends on a running cluster.
"""

from collections.abc import Sequence
from typing import Any, Literal, Self, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mars_ray.engine.mode import DEFAULT_THRESHOLD
from mars_ray.engine.service_class import ServiceClass

FLOOR = 0.9
"""Floor of classes that do not set one. Below this threshold, each additional token per forward costs several times as
much quality (arXiv 2604.07023, GSM8K)."""
LENIENT_FLOOR = 0.1
"""Floor of such classes where thresholds apply to drafts. Below it, a draft saves hardly more forwards."""

PolicyName = Literal["fixed", "capacity", "deadline"]


def check_policy(name: object) -> None:
    """Raise `ValueError` unless a policy has this name."""
    if name not in get_args(PolicyName):
        raise ValueError(
            f"policy is {name!r}; use 'capacity', which follows load and latency, 'fixed', or 'deadline' for jobs"
        )


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SloSettings(_Settings):
    """Latency targets promised to callers, to be met by 95 of 100 requests."""

    ttft_ms: float | None = Field(None, gt=0)
    """Maximum milliseconds from arrival to first token."""
    tpot_ms: float | None = Field(None, gt=0)
    """Maximum milliseconds per token after the first."""


class ControlSettings(_Settings):
    """Settings that determine how thresholds follow the load."""

    policy: PolicyName = "capacity"
    """'fixed' never lowers thresholds. 'capacity' follows the demand relative to the measured speed, and the measured
    latency; 'deadline' follows the remaining work of a batch job."""
    slo: SloSettings = SloSettings()
    """Latency promised to callers, for the policy 'capacity' and for the number of desired replicas."""
    headroom: float = Field(0.02, ge=0, lt=1)
    """Share of the replicas' time, or of a batch job's time, that is kept free."""
    recover_s: float = Field(40.0, ge=0)
    """Seconds for which the load must have allowed a higher threshold before the threshold rises."""
    min_agreement: float = Field(0.95, ge=0, le=1)
    """Minimum share of tokens that equal those of autoregressive decoding, as measured by calibration or live audit.
    Thresholds with lower agreement are never used."""
    max_accuracy_loss: float = Field(0.01, ge=0, le=1)
    """Maximum share of right answers that a threshold may lose compared with threshold 1, as measured by calibration.
    Thresholds that lose more are never used. The default follows MLPerf Inference, where a system counts as the same
    model if it keeps 99 % of the reference's accuracy."""
    in_time_per_accuracy: float = Field(3.0, ge=0)
    """Exchange rate: one percentage point of accuracy is given up only if at least this many more percentage points of
    requests finish in time. 0 gives up accuracy for any gain."""
    lease_s: float = Field(5.0, gt=0)
    """Seconds for which a replica keeps following a controller that has stopped answering."""

    @field_validator("policy", mode="before")
    @classmethod
    def _known_policy(cls, value: Any) -> Any:
        check_policy(value)
        return value

    def check_for_endpoint(self) -> None:
        """Raise `ValueError` if the policy is for jobs."""
        if self.policy == "deadline":
            raise ValueError("policy is 'deadline', which is for jobs; use 'capacity' or 'fixed'")


def interpolate_quality(points: Sequence[tuple[float, float]], threshold: float) -> float:
    """Return the quality at a threshold by linear interpolation between `points`.

    Quality never rises as thresholds fall; measurements that say otherwise are treated as noise.
    """
    thresholds, values = np.array(sorted(points, reverse=True)).T
    return float(np.interp(-threshold, -thresholds, np.minimum.accumulate(values)))


class ControlPlan(_Settings):
    """Model, settings and calibration: all inputs of the controller except reports."""

    model: str = ""
    """Name of the model. It is part of the controller's identity, because measured speeds apply to one model only."""
    settings: ControlSettings = ControlSettings()
    ceiling: float = Field(DEFAULT_THRESHOLD, ge=0, le=1)
    """Threshold of all classes while capacity suffices; 1 is lossless."""
    classes: tuple[ServiceClass, ...] = (ServiceClass(),)
    agreement: tuple[tuple[float, float], ...] = ()
    """Calibrated pairs of a threshold and the share of tokens that equal those of autoregressive decoding."""
    accuracy: tuple[tuple[float, float], ...] = ()
    """Calibrated pairs of a threshold and the share of right answers; empty if no answers could be verified."""
    lenient: bool = False
    """Whether thresholds apply to drafts, as they do with an adapter (see `Acceptance`)."""

    @model_validator(mode="after")
    def _floors_below_the_ceiling(self) -> Self:
        for service_class in self.classes:
            name = service_class.name
            floor = service_class.floor
            if floor is not None and floor > self.ceiling:
                raise ValueError(
                    f"floor of class {name} is {floor}; it must be from 0 to the threshold, {self.ceiling}"
                )
        return self

    def quality(self, threshold: float) -> float:
        """Return the calibrated accuracy at a threshold, or the calibrated agreement if accuracy is not known."""
        points = self.accuracy or self.agreement
        return interpolate_quality(points, threshold) if points else 1.0

    def floor(self, name: str) -> float:
        """Return the lowest threshold that a class allows."""
        floor = next(service_class.floor for service_class in self.classes if service_class.name == name)
        return min(LENIENT_FLOOR if self.lenient else FLOOR, self.ceiling) if floor is None else floor

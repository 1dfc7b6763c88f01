"""What a simulated replica can do: sizes, step times, and how much each threshold accepts, as measured on a machine.

In:    a JSON file, or the one that comes with mars-ray.
Out:   a frozen model; acceptance, agreement and accuracy at any threshold.
Never: measures anything (see `simulate/measure`).
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mars_ray.engine.profile import ProfilePoint
from mars_ray.engine.step_time import StepTime
from mars_ray.errors import ConfigError

Array = NDArray[np.float64]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StepSeconds(_Frozen):
    """The fields of a `StepTime`."""

    fixed_s: float = Field(gt=0)
    row_s: Seconds = 0.0
    position_s: Seconds = 0.0
    kv_token_s: Seconds = 0.0
    prompt_s: Seconds = 0.0
    prompt_token_s: Seconds = 0.0


class ThresholdPoint(_Frozen):
    """The fields of a `ProfilePoint`."""

    threshold: Share
    survival: tuple[Share, ...]
    agreement: Share | None = None
    audited: float = Field(0.0, ge=0)


class Machine(_Frozen):
    """One replica."""

    rows: int = Field(ge=1, le=4096)
    queue: int = Field(ge=1, le=65536)
    prefill_tokens: int = Field(512, ge=1)
    positions: int = Field(ge=2)
    """Tokens of one sequence, prompt and output; longer ones are cut."""
    step_time: StepSeconds
    profile: tuple[ThresholdPoint, ...] = Field(min_length=2)
    """Thresholds fall from 1."""
    accuracy: tuple[tuple[Share, Share], ...] = Field(min_length=1)
    """Calibrated: threshold, share of right answers; thresholds fall."""
    measured_on: dict[str, Any] = {}

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for name, found in (
            ("profile", [point.threshold for point in self.profile]),
            ("accuracy", [threshold for threshold, _ in self.accuracy]),
        ):
            if found != sorted(set(found), reverse=True):
                raise ValueError(f"thresholds of {name} must fall")
        if self.profile[0].threshold != 1 or len({len(point.survival) for point in self.profile}) != 1:
            raise ValueError("profile must begin at threshold 1 and have as many masks at each")
        return self

    @property
    def masks(self) -> int:
        """Masks behind a token at the full block."""
        return len(self.profile[0].survival)

    def times(self) -> StepTime:
        """Return the step times as the engine reports them."""
        return StepTime(**self.step_time.model_dump())

    def points(self) -> tuple[ProfilePoint, ...]:
        """Return the profile as the engine reports it."""
        return tuple(ProfilePoint(**point.model_dump()) for point in self.profile)

    def survival(self, threshold: float) -> Array:
        """Return, for each mask, the share of forwards that accept it, read linearly as the engine does."""
        if threshold >= 1:
            return np.zeros(self.masks)
        known = np.array([-point.threshold for point in self.profile])
        columns = np.array([point.survival for point in self.profile]).T
        return np.array([np.interp(-threshold, known, column) for column in columns])

    def agreement_at(self, threshold: float) -> float:
        """Return the share of tokens that are those of autoregressive decoding."""
        known = [(each.threshold, each.agreement) for each in self.profile if each.agreement is not None]
        return _read(threshold, known) if known else 1.0

    def accuracy_at(self, threshold: float) -> float:
        """Return the share of right answers."""
        return _read(threshold, self.accuracy)


def _read(threshold: float, points: Sequence[tuple[float, float]]) -> float:
    """Return the value at `threshold` of a curve over falling thresholds."""
    thresholds, values = np.array(points).T
    return float(np.interp(-threshold, -thresholds, values))


def read_machine(path: Path | None) -> Machine:
    """Read a file, or the figures that come with mars-ray. Raises `ConfigError` naming what is wrong."""
    path = path or Path(str(files("mars_ray") / "assets" / "machine.json"))
    try:
        return Machine.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give a machine file.") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path} is no machine file: {place}: {first['msg']}.") from error

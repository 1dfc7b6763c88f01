"""Figures of a replica for simulations: sizes, step times, and the tokens accepted at each threshold.

Measured figures are read from a JSON file written by `python -m benchmarks.simulated_machine`, or from the file in the
package. For GPUs, `modelled_machine` computes the figures.
"""

from dataclasses import astuple, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mars_ray.control.control_settings import interpolate_quality
from mars_ray.engine.stats.lookahead import Lookahead, autoregressive, interpolate
from mars_ray.engine.stats.profile import ProfilePoint
from mars_ray.engine.stats.step_time import StepTime
from mars_ray.errors import ConfigError, problems_of

Share = Annotated[float, Field(ge=0, le=1)]


class Machine(BaseModel):
    """Measured or modelled figures of one replica."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_num_seqs: int = Field(ge=1, le=4096)
    max_waiting_seqs: int = Field(ge=1, le=65536)
    max_prefill_tokens: int = Field(512, ge=1)
    max_model_len: int = Field(ge=2)
    """Maximum number of tokens in one sequence, prompt and output together."""
    step_time: StepTime
    """Linear model of a step, as the engine fits it and reports it to the controller."""
    roofline: tuple[StepTime, ...] | None = None
    """Two linear models; a step takes the longer of their times. None means that a step takes `step_time`."""
    profile: tuple[ProfilePoint, ...] = Field(min_length=2)
    """Tokens and positions per forward at each threshold, from threshold 1 downwards."""
    accuracy: tuple[tuple[Share, Share], ...] = Field(min_length=1)
    """Calibrated pairs of threshold and accuracy, from the highest threshold downwards."""
    measured_on: dict[str, Any] = {}

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for name, thresholds in (
            ("profile", [point.threshold for point in self.profile]),
            ("accuracy", [threshold for threshold, _ in self.accuracy]),
        ):
            if thresholds != sorted(set(thresholds), reverse=True):
                raise ValueError(f"thresholds of {name} must fall from one to the next")
        if (
            self.profile[0].threshold != 1
            or not self.profile[0].tokens
            or len({len(values) for point in self.profile for values in (point.tokens, point.positions)}) != 1
        ):
            raise ValueError("profile must begin at threshold 1 and have the same number of blocks at each threshold")
        if any(value < 1 for point in self.profile for value in (*point.tokens, *point.positions)):
            raise ValueError("tokens and positions of profile must be at least 1")
        shares = [share for point in self.profile for share in (point.threshold, point.agreement) if share is not None]
        if any(not 0 <= share <= 1 for share in shares):
            raise ValueError("thresholds and agreements of profile must be from 0 to 1")
        for times in (self.step_time, *self.lines):
            if times.fixed_s <= 0 or min(astuple(times)) < 0:
                raise ValueError("fixed_s of step_time must be above 0, the other seconds at least 0")
        return self

    @property
    def lines(self) -> tuple[StepTime, ...]:
        """Linear models of a step; a step takes the longest of their times."""
        return self.roofline or (self.step_time,)

    @property
    def masks(self) -> int:
        """Number of masks that follow a token when the block is full."""
        return len(self.profile[0].tokens) - 1

    def lookahead(self, threshold: float) -> Lookahead:
        """Return the tokens and positions at a threshold, by block, interpolated as in the engine."""
        thresholds = [point.threshold for point in self.profile]
        return interpolate(thresholds, lambda index: self.profile[index].lookahead, threshold)

    def without_lookahead(self) -> Self:
        """Return the machine with autoregressive decoding, one token at a time, at threshold 1."""
        first, *others = self.profile
        plain = autoregressive(len(first.tokens))
        first = replace(first, tokens=tuple(plain.tokens_B.tolist()), positions=tuple(plain.positions_B.tolist()))
        return self.model_copy(update={"profile": (first, *others)})

    @property
    def agreement(self) -> tuple[tuple[float, float], ...]:
        """Calibrated pairs of threshold and agreement."""
        return tuple((point.threshold, point.agreement) for point in self.profile if point.agreement is not None)

    def agreement_at(self, threshold: float) -> float:
        """Return the share of tokens decoded at `threshold` that autoregressive decoding would choose too."""
        return interpolate_quality(self.agreement, threshold) if self.agreement else 1.0

    def accuracy_at(self, threshold: float) -> float:
        """Return the share of correct answers at a threshold."""
        return interpolate_quality(self.accuracy, threshold)


def read_machine(path: Path | None) -> Machine:
    """Read a machine file. If the path is None, read the file in the package. Raises `ConfigError`."""
    path = path or Path(str(files("mars_ray") / "assets" / "machine.json"))
    try:
        return Machine.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give a machine file.") from error
    except ValidationError as error:
        raise ConfigError(f"{path} is not a machine file: {problems_of(error)}.") from error

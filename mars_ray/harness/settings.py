"""The settings in `--model_args` of our model, checked before the model is loaded.

Temperature, stop strings and the like come with the requests of a task.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import ConfigError, RequestError
from mars_ray.method.metric import Metric
from mars_ray.model.dtype import DtypeOrAuto


class HarnessSettings(BaseModel):
    """Model and decoding settings."""

    # The harness turns "7" into a number, even if it is the name of a folder.
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    model: str
    """'bundled', 'smollm2', a folder, a .gguf file or a name on a hub."""
    mode: Mode = Mode.THRESHOLD
    threshold: float | None = None
    """The threshold; None is 1, which gives the answers of one token at a time. Modes ar and exact ignore it."""
    metric: Metric = Metric.PROBABILITY
    """Confidence to compare with the threshold."""
    block: int | None = None
    """Tokens proposed per forward; None takes the block of the training. It never depends on load, because answers in
    threshold mode depend on it."""
    max_gen_toks: int = Field(256, ge=1)
    """Largest number of generated tokens, for tasks that name none."""
    dtype: DtypeOrAuto = "auto"
    device: str | None = None
    """A torch device. None takes a GPU if there is one; without a GPU "cuda" means the CPU."""

    @model_validator(mode="after")
    def _can_decode(self) -> Self:
        try:
            self.decode(block=self.block or 1)
        except RequestError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return self

    def decode(self, *, block: int) -> DecodeParams:
        """Return the decoding parameters of requests; `block` is the block if the settings name none."""
        return DecodeParams(
            mode=self.mode,
            threshold=self.threshold,
            metric=self.metric,
            block=block if self.block is None else self.block,
        )


def parse_settings(arguments: Mapping[str, object]) -> HarnessSettings:
    """Parse `arguments`. Raises `ConfigError` for the first wrong one."""
    known = HarnessSettings.model_fields
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise ConfigError(f"model_args: {unknown[0]!r} is unknown; there are {', '.join(known)}.")
    if "model" not in arguments:
        raise ConfigError("model_args: model is missing; give 'bundled' or a model folder, as in model=bundled.")
    try:
        return HarnessSettings.model_validate(dict(arguments))
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # an error about several settings, which names them
            raise ConfigError(f"model_args: {first['ctx']['error']}.") from None
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"model_args: {name}: {first['msg']}; it is {first['input']!r}.") from None

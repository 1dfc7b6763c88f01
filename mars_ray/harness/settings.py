"""The settings in `--model_args` of our model.

Unknown names and impossible values fail before a model is loaded. What a task decides, such as temperature and stop
strings, comes with its requests.
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
    """Which model decodes, and how it looks ahead."""

    # The harness turns "7" into a number, also where it is the name of a folder.
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    model: str
    """'bundled', 'smollm2', a folder, a .gguf file or a name on a hub."""
    mode: Mode = Mode.THRESHOLD
    threshold: float | None = None
    """The threshold; None is 1, the answers of one token at a time. In mode exact it is what a draft needs, 0.7 by
    default."""
    metric: Metric = Metric.PROBABILITY
    """The confidence that is compared with the threshold."""
    block: int | None = None
    """Tokens proposed per forward; None takes what the model was trained with. The load never decides, since in
    threshold mode the answer depends on it."""
    max_gen_toks: int = Field(256, ge=1)
    """Tokens generated at most, where a task does not say."""
    dtype: DtypeOrAuto = "auto"
    device: str | None = None
    """A device of torch. None takes a GPU where there is one, and where there is none a GPU stands for the CPU."""

    @model_validator(mode="after")
    def _can_decode(self) -> Self:
        try:
            self.decode(block=self.block or 1)
        except RequestError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return self

    def decode(self, *, block: int) -> DecodeParams:
        """Return how requests look ahead, in blocks of `block` where the settings name none."""
        return DecodeParams(
            mode=self.mode,
            threshold=self.threshold,
            metric=self.metric,
            block=block if self.block is None else self.block,
        )


def parse_settings(arguments: Mapping[str, object]) -> HarnessSettings:
    """Return the settings in `arguments`. Raises `ConfigError` naming the first that is wrong."""
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
        if not first["loc"]:  # it is about several of them, and says which
            raise ConfigError(f"model_args: {first['ctx']['error']}.") from None
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"model_args: {name}: {first['msg']}; it is {first['input']!r}.") from None

"""Settings that our model accepts in `--model_args`; they are checked before the model is loaded.

Temperature, stop strings and similar arguments come with the requests of a task.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import ConfigError, RequestError, problems_of
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
    """What a token ahead must reach to be kept. None means 1, which gives the same answers as decoding one token at a
    time. Modes ar and exact ignore it."""
    metric: Metric = Metric.PROBABILITY
    """Confidence metric that is compared with the threshold."""
    block: int | None = None
    """Tokens proposed per forward; None uses the block size of the training. The load never changes it, because
    answers in threshold mode depend on it."""
    max_gen_toks: int = Field(256, ge=1)
    """Maximum number of generated tokens, for tasks that set no limit."""
    dtype: DtypeOrAuto = "auto"
    device: str | None = None
    """Torch device. None uses a GPU if there is one. Without a GPU, "cuda" means the CPU."""

    @model_validator(mode="after")
    def _can_decode(self) -> Self:
        try:
            self.decode(block=self.block or 1)
        except RequestError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return self

    def decode(self, *, block: int) -> DecodeParams:
        """Return the decoding parameters of requests; `block` applies if the settings do not set one."""
        return DecodeParams(
            mode=self.mode,
            threshold=self.threshold,
            metric=self.metric,
            block=block if self.block is None else self.block,
        )


def parse_settings(arguments: Mapping[str, object]) -> HarnessSettings:
    """Parse `arguments`. Raises `ConfigError` for the first invalid argument."""
    names = HarnessSettings.model_fields
    unknown = [name for name in arguments if name not in names]
    if unknown:
        raise ConfigError(f"model_args: {unknown[0]!r} is unknown; known arguments are {', '.join(names)}.")
    if "model" not in arguments:
        raise ConfigError("model_args: model is missing; give 'bundled' or a model folder, as in model=bundled.")
    try:
        return HarnessSettings.model_validate(dict(arguments))
    except ValidationError as error:
        raise ConfigError(f"model_args: {problems_of(error)}.") from None

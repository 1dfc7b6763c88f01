"""Settings of a further model of an endpoint."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from mars_ray.serve.deploy.model_settings import ModelSettings

Access = dict[str, tuple[str, ...]]
"""Accounts that may use a model or an adapter, keyed by its name. For other accounts it does not exist. Names without
an entry are open to all callers."""


class AddedModel(ModelSettings):
    """Settings of a further model of an endpoint, whose engines start and end while the endpoint runs."""

    moved: ClassVar[Mapping[str, str]] = {
        "sleep_after_s": "set `min_replicas: 0` and `downscale_to_zero_delay_s`; see docs/models.md"
    }

    model: str
    """Name of the model, as for the main model. Classes of service without a setting keep that of the endpoint."""
    access: Access = Field(default_factory=dict)
    min_replicas: int = Field(1, ge=0, le=1000)
    """Minimum number of engines. At 0, the last engine ends after `downscale_to_zero_delay_s` without a request, and
    the next request starts one."""
    max_replicas: int | None = Field(None, ge=1, le=1000)
    """Maximum number of engines under load; None means `min_replicas`, at least 1."""
    downscale_to_zero_delay_s: float = Field(600, ge=0)
    """Seconds without a request after which the last engine ends, with `min_replicas: 0`."""
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    """Resources of each engine in Ray, such as `{num_gpus: 1}`. By default an engine reserves as many CPUs as
    `engine.threads` says, and none without that setting, because the main model may have them all."""

    @model_validator(mode="after")
    def _replicas_make_sense(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, below min_replicas, {self.min_replicas}")
        return self

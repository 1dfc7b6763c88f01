"""Settings that each model of an endpoint has of its own.

In:    the parsed YAML.
Out:   frozen settings; unknown names and impossible values raise errors when they are read.
Never: repeats a setting that Ray Serve has for the deployments of a config file.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from mars_ray.chat.call_format import ReasoningParserName, ToolParserName
from mars_ray.control.control_settings import ControlPlan, ControlSettings
from mars_ray.engine.mode import DEFAULT_THRESHOLD
from mars_ray.engine.options import AtLeastOne, EngineTuning
from mars_ray.engine.service_class import BATCH_CLASS, ServiceClass
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.model.resolve import BUNDLED, exists


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EngineConfig(EngineTuning):
    """Engine settings of each replica."""

    max_waiting_seqs: AtLeastOne = 64
    """Maximum number of sequences that wait in a replica."""
    threads: AtLeastOne | None = None
    """Number of threads that run a step on a CPU, and of CPUs that the replica reserves in Ray. None means the number
    of CPUs that the deployment reserves for a replica, at least 1. On a single machine, `mars-ray serve` divides the
    CPUs among the engines."""
    dtype: DtypeOrAuto = "auto"
    """`auto` means bfloat16 for large 16-bit checkpoints on machines with fast bfloat16, and float32 otherwise."""
    price_per_hour: Annotated[float, Field(ge=0, le=1e12)] | None = None
    """Price of one replica for an hour, in any currency, from which prices per million tokens follow. None means the
    price of the GPU whose step times the engine takes, and no price with the times of this machine."""

    @property
    def replica_price(self) -> float | None:
        """Price of one replica for an hour, set or of the GPU whose step times it takes; None if there is neither."""
        if self.price_per_hour is not None or self.step_model is None:
            return self.price_per_hour
        return self.step_model.gpu.dollars_per_hour


class ModelSettings(BaseModel, extra="forbid", frozen=True):
    """Settings of one model."""

    model: str = "bundled"
    """'bundled', 'smollm2', a URL, a name on a hub, or a folder or .gguf file on the node that builds the application.
    The other nodes fetch the folder or file from there."""
    adapter: str | None = None
    """Adapter trained for the model: one in the package ('smollm2'), a folder, a URL, or a name on a hub."""
    adapters: dict[str, str] = {}
    """Further adapters, keyed by name. Callers select an adapter as a model, by this name."""
    served_model_names: tuple[str, ...] = ()
    """Further names under which callers may request the model. Answers carry the name that was requested."""
    mode: Literal["ar", "threshold", "exact"] = "threshold"
    """Mode of requests that do not set one. 'exact' returns the same answers as 'ar', but faster."""
    threshold: float = Field(DEFAULT_THRESHOLD, ge=0, le=1)
    """Threshold of requests that do not set one. Under load, the controller lowers it. At 1, drafts are verified, so
    answers equal those of decoding one token at a time."""
    classes: tuple[ServiceClass, ...] = (ServiceClass(), ServiceClass(name=BATCH_CLASS, priority=-1, share=0.25))
    """Classes of service. A key may name its class; keys without one belong to the first class. Requests with
    `service_tier: flex` belong to the class `batch` if it exists."""
    tool_call_parser: ToolParserName | None = None
    """Format of the model's tool calls. None finds it in the chat template. If the template renders no tools, a system
    message describes them."""
    reasoning_parser: ReasoningParserName | None = None
    """Format of the model's reasoning, which becomes `reasoning_content`. None finds it in the chat template."""
    control: ControlSettings = ControlSettings()
    """Settings for adapting thresholds to the load."""
    engine: EngineConfig = EngineConfig()

    @field_validator("engine", mode="before")
    @classmethod
    def _engine_by_name(cls, engine: Any) -> Any:
        return engine_fields(engine)

    @field_validator("control")
    @classmethod
    def _policy_follows_load(cls, control: ControlSettings) -> ControlSettings:
        control.check_for_endpoint()
        return control

    @model_validator(mode="after")
    def _classes_make_sense(self) -> Self:
        if len({service_class.name for service_class in self.classes}) < max(1, len(self.classes)):
            raise ValueError("name at least one class of service, and each only once")
        ControlPlan(ceiling=self.threshold, classes=self.classes)
        return self

    @property
    def class_names(self) -> list[str]:
        """Names of the classes of service."""
        return [service_class.name for service_class in self.classes]

    def names(self, name: str) -> list[str]:
        """Return the names that callers may request: of the model, which is called `name`, and of its adapters."""
        return [name, *self.served_model_names, *self.adapters]


def engine_fields(engine: Any) -> Any:
    """Return the fields of `EngineConfig` for `engine`, which may also be the name of an engine alone."""
    return {"engine": engine} if isinstance(engine, str) else engine


def absolute_model(model: ModelSettings) -> dict[str, Any]:
    """Return the names of a model and its adapters, with the paths of folders on this machine made absolute."""
    return {
        "model": _absolute_path(model.model),
        "adapter": model.adapter and _absolute_path(model.adapter),
        "adapters": {name: _absolute_path(adapter) for name, adapter in model.adapters.items()},
    }


def _absolute_path(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder.absolute()) if name != BUNDLED and exists(folder) else name

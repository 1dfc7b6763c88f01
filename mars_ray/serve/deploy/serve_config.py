"""Settings of the endpoint: the `args` of the application in a Serve config file.

In:    the parsed YAML.
Out:   frozen settings; unknown names and impossible values fail when they are read.
Never: repeats a setting of Ray Serve: replicas, autoscaling, host and port stand where Serve has them.
"""

from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic.fields import FieldInfo

from mars_ray.adapter.card import decoding_card, resolve_adapter, resolve_adapters
from mars_ray.control.control_settings import ControlPlan, ControlSettings
from mars_ray.engine.mode import DEFAULT_THRESHOLD
from mars_ray.engine.options import AtLeastOne, EngineOptions, EngineTuning
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.engine.service_class import BATCH_CLASS, ServiceClass
from mars_ray.errors import ConfigError
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.model.resolve import short_name
from mars_ray.openai_api.request_limits import RequestLimits

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EngineConfig(EngineTuning):
    """The engine of each replica."""

    max_waiting_seqs: AtLeastOne = 64
    """Sequences that may wait in a replica."""
    threads: AtLeastOne | None = None
    """Threads of a step on a CPU, and CPUs that the replica asks Ray for; None takes what its deployment asks for, or
    one. `mars-ray serve` on this machine alone shares its CPUs between the engines."""
    dtype: DtypeOrAuto = "auto"
    """`auto` takes bfloat16 for large checkpoints of 16 bits where the machine is fast at it, else float32."""


class ServeConfig(_Settings):
    """The endpoint of one model."""

    model: str = "bundled"
    """'bundled', 'smollm2', a folder or a .gguf file of the node where the application is built, which the others fetch
    from there, a URL, or a name on a hub."""
    adapter: str | None = None
    """An adapter that was trained for the model: 'smollm2', which comes with the package, a folder or URL as above, or
    a name on a hub."""
    adapters: dict[str, str] = {}
    """Further adapters, as above, by the names that callers call them: each is a model of the endpoint."""
    name: str | None = None
    """What callers call the model; None takes the name of the folder."""
    mode: Literal["ar", "threshold", "exact"] = "threshold"
    """The mode of requests that name none. 'exact' gives the answers of one token at a time, sooner."""
    threshold: float = Field(DEFAULT_THRESHOLD, ge=0, le=1)
    """The threshold of requests that name none, while there is room: the controller goes no higher. At 1 tokens ahead
    are verified, and answers are those of one token at a time."""
    classes: tuple[ServiceClass, ...] = (ServiceClass(), ServiceClass(name=BATCH_CLASS, priority=-1, share=0.25))
    """The classes of service. A key may name its class; a key that names none is of the first, except for requests with
    `service_tier: flex`, which are of the class `batch` if there is one."""
    controller: str | None = None
    """Name of the controller of the thresholds: deployments that name the same one, with the same settings, are judged
    together. None takes the one of the Serve application."""
    control: ControlSettings = ControlSettings()
    """How thresholds follow the load."""
    engine: EngineConfig = EngineConfig()
    limits: RequestLimits = RequestLimits()
    keys: Path | None = None
    """File of API keys (`mars-ray keys add`), which every node must have. Without one the endpoint answers on the
    loopback interface only."""
    allowed_hosts: frozenset[str] = LOOPBACK
    """Names in the Host header the endpoint answers to; '*' for all."""
    web: bool = True
    """Show the playground at `/` and the live view at `/cluster`. The pages need no key, what they ask for does."""
    log_prompts: bool = False
    """Write prompts into the request log."""

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _at_least_one_host(cls, hosts: Any) -> Any:
        if not hosts:
            raise ValueError("name at least one host")
        return hosts

    @model_validator(mode="after")
    def _plan_makes_sense(self) -> Self:
        if len({each.name for each in self.classes}) < max(1, len(self.classes)):
            raise ValueError("name one class of service or more, each once")
        ControlPlan(ceiling=self.threshold, classes=self.classes)
        if self.model_name in self.adapters:
            raise ValueError(f"call no adapter {self.model_name!r}, which is the model")
        return self

    @property
    def model_name(self) -> str:
        """What callers call the model."""
        return self.name or short_name(self.model)

    def engine_spec(self, folder: Path, cpus: float = 1.0) -> EngineSpec:
        """Return the engine to start for the model in `folder`, on a replica for which Ray reserved `cpus`."""
        engine, limits = self.engine, self.limits
        return EngineSpec(
            folder=folder,
            dtype=engine.dtype,
            threads=engine.threads or max(1, int(cpus)),
            adapters=resolve_adapters(self.adapter, self.adapters),
            options=EngineOptions(
                **engine.tuning,
                max_waiting_seqs=engine.max_waiting_seqs,
                max_request_tokens=limits.n * limits.output_tokens,
                threshold=self.threshold,
                classes=self.classes,
            ),
        )

    def plan(self, folder: Path) -> ControlPlan:
        """Return the control plan for the model in `folder`. Raises `ModelError` for an invalid card."""
        card = decoding_card(folder, resolve_adapter(self.adapter))
        points = card.calibration if card else ()
        return ControlPlan(
            model=self.model,
            settings=self.control,
            ceiling=self.threshold,
            classes=self.classes,
            agreement=tuple((each.threshold, each.agreement) for each in points),
            accuracy=tuple((each.threshold, each.accuracy) for each in points if each.accuracy is not None),
        )


def parse_config(fields: dict[str, Any], source: str = "args", place: str = "") -> ServeConfig:
    """Return the settings in `fields`. Raises `ConfigError` naming the first that is wrong, and where in `source`."""
    check_names(ServeConfig, fields, source, place)
    try:
        return ServeConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(filter(None, (place, *map(str, first["loc"]))))
        raise ConfigError(f"{source}: {name}: {first['msg']}; it is {first['input']!r}.") from None


def check_exposure(host: str, config: ServeConfig) -> None:
    """Raise a `ConfigError` if other machines could reach an endpoint that has no keys."""
    if config.keys is None and host not in LOOPBACK:
        raise ConfigError(
            f"the host is {host!r} and there are no API keys: everyone who reaches this machine could use the model. "
            "Set keys (see `mars-ray keys add`), or listen on 127.0.0.1."
        )


def check_names(model: type, fields: Any, source: str, place: str = "") -> None:
    """Raise a `ConfigError` for the first name in `fields`, at any depth, that `model` does not know."""
    model_fields = _fields_of(model)
    assert model_fields is not None, f"{model.__name__} is no pydantic class"
    where = f"{source}: {place}" if place else source
    known = ", ".join(model_fields)
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is {fields!r}; give fields. Known are {known}.")
    for name, value in fields.items():
        if name not in model_fields:
            raise ConfigError(f"{where}: unknown field {name!r}. Known are {known}.")
        inner = _model_in(model_fields[name].annotation)
        below = f"{place}.{name}" if place else name
        if inner and isinstance(value, dict):
            check_names(inner, value, source, below)
        if inner and isinstance(value, list):
            for number, item in enumerate(value):
                check_names(inner, item, source, f"{below}[{number}]")


def _fields_of(model: Any) -> dict[str, FieldInfo] | None:
    """Return the fields of a pydantic model or dataclass, None for any other type."""
    if not isinstance(model, type):
        return None
    if issubclass(model, BaseModel):
        return model.model_fields
    return model.__pydantic_fields__ if is_pydantic_dataclass(model) else None


def _model_in(annotation: Any) -> type | None:
    """Return the pydantic class in an annotation such as `Optional[List[Model]]`."""
    if _fields_of(annotation) is not None:
        model: type = annotation
        return model
    return next(filter(None, map(_model_in, get_args(annotation))), None)

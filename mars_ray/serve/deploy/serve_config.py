"""Settings of the endpoint: the `args` of the application in a Serve config file.

In:    the parsed YAML.
Out:   frozen settings; unknown names and impossible values raise errors when they are read.
Never: repeats a setting of Ray Serve: replicas, autoscaling, host and port belong in Serve's own fields.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

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
from mars_ray.machines.registry import step_model
from mars_ray.model.card import accuracies, agreements
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.model.resolve import short_name
from mars_ray.openai_api.call_format import ReasoningParserName, ToolParserName
from mars_ray.openai_api.request_limits import RequestLimits

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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
    price of the GPU that `rehearse` names, and no price without `rehearse`."""

    @property
    def replica_price(self) -> float | None:
        """Price of one replica for an hour, set or taken from the rehearsed GPU; None if there is neither."""
        if self.price_per_hour is not None or self.rehearse is None:
            return self.price_per_hour
        return step_model(self.rehearse).gpu.dollars_per_hour


class ServeConfig(_Settings):
    """Settings of the endpoint of one model."""

    model: str = "bundled"
    """'bundled', 'smollm2', a URL, a name on a hub, or a folder or .gguf file on the node that builds the application.
    The other nodes fetch the folder or file from there."""
    adapter: str | None = None
    """Adapter trained for the model: 'smollm2' (part of the package), a folder, a URL, or a name on a hub."""
    adapters: dict[str, str] = {}
    """Further adapters, keyed by name. Callers select an adapter as a model, by this name."""
    name: str | None = None
    """Name of the model in the API; None means the name of its folder."""
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
    controller: str | None = None
    """Name of the controller that sets the thresholds. Deployments with the same controller and the same settings are
    controlled together. None means the controller of the Serve application."""
    migration_limit: int = Field(2, ge=0)
    """Maximum number of times that a begun stream moves to another replica because its replica died. At 0, the stream
    ends with an error."""
    control: ControlSettings = ControlSettings()
    """Settings for adapting thresholds to the load."""
    engine: EngineConfig = EngineConfig()
    limits: RequestLimits = RequestLimits()
    keys: Path | None = None
    """File of API keys (`mars-ray keys add`), which every node must have. An endpoint without a key file listens on the
    loopback interface only."""
    allowed_hosts: frozenset[str] = LOOPBACK
    """Names that the endpoint accepts in the Host header; '*' accepts all."""
    web: bool = True
    """Serve the playground at `/` and the live view at `/cluster`. The pages need no key, but their requests do."""
    log_prompts: bool = False
    """Write prompts into the request log."""

    @field_validator("engine", mode="before")
    @classmethod
    def _engine_by_name(cls, engine: Any) -> Any:
        return engine_fields(engine)

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _at_least_one_host(cls, hosts: Any) -> Any:
        if not hosts:
            raise ValueError("name at least one host")
        return hosts

    @model_validator(mode="after")
    def _plan_makes_sense(self) -> Self:
        if len({service_class.name for service_class in self.classes}) < max(1, len(self.classes)):
            raise ValueError("name at least one class of service, and each only once")
        ControlPlan(ceiling=self.threshold, classes=self.classes)
        names = [self.model_name, *self.served_model_names, *self.adapters]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice!r} names two models or adapters; names must differ")
        return self

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        return self.name or short_name(self.model)

    def engine_spec(self, folder: Path, cpus: float = 1.0) -> EngineSpec:
        """Return the spec of an engine for the model in `folder`; Ray has reserved `cpus` CPUs for each replica."""
        engine = self.engine
        return EngineSpec(
            folder=folder,
            dtype=engine.dtype,
            threads=engine.threads or max(1, int(cpus)),
            adapters=resolve_adapters(self.adapter, self.adapters),
            options=EngineOptions(
                **engine.tuning,
                max_waiting_seqs=engine.max_waiting_seqs,
                max_request_tokens=self.limits.n * self.limits.output_tokens,
                threshold=self.threshold,
                classes=self.classes,
            ),
        )

    def plan(self, folder: Path) -> ControlPlan:
        """Return the control plan for the model in `folder`. Raises `ModelError` if the card is invalid."""
        card = decoding_card(folder, resolve_adapter(self.adapter))
        points = card.calibration if card else ()
        return ControlPlan(
            model=self.model,
            settings=self.control,
            ceiling=self.threshold,
            classes=self.classes,
            agreement=agreements(points),
            accuracy=accuracies(points),
        )


def engine_fields(engine: Any) -> Any:
    """Return the fields of `EngineConfig` for `engine`, which may also be the name of an engine alone."""
    return {"engine": engine} if isinstance(engine, str) else engine


def parse_config(fields: dict[str, Any], source: str = "args", path: str = "") -> ServeConfig:
    """Return the settings in `fields`.

    Raises a `ConfigError` that names `source` and the first wrong field by its full path, which begins with `path`.
    """
    check_names(ServeConfig, fields, source, path)
    try:
        return ServeConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(filter(None, (path, *map(str, first["loc"]))))
        raise ConfigError(
            f"{source}: {name}: {first['msg'].removeprefix('Value error, ')}; it is {first['input']!r}."
        ) from None


def check_exposure(host: str, config: ServeConfig) -> None:
    """Raise a `ConfigError` if other machines could reach an endpoint without keys."""
    if config.keys is None and host not in LOOPBACK:
        raise ConfigError(
            f"the host is {host!r} and there are no API keys: everyone who can reach this machine could use the model. "
            "Set keys (see `mars-ray keys add`), or listen on 127.0.0.1."
        )


def check_names(model: type, fields: Any, source: str, path: str = "") -> None:
    """Raise a `ConfigError` for the first name in `fields`, at any depth, that `model` does not define."""
    model_fields = _fields_of(model)
    assert model_fields is not None, f"{model.__name__} is not a pydantic class"
    where = f"{source}: {path}" if path else source
    names = ", ".join(model_fields)
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is {fields!r}, must be a mapping of fields. Known are {names}.")
    for name, value in fields.items():
        if name not in model_fields:
            raise ConfigError(f"{where}: unknown field {name!r}. Known are {names}.")
        inner_model = _model_in(model_fields[name].annotation)
        inner_path = f"{path}.{name}" if path else name
        if inner_model and isinstance(value, dict):
            check_names(inner_model, value, source, inner_path)
        if inner_model and isinstance(value, list):
            for number, item in enumerate(value):
                check_names(inner_model, item, source, f"{inner_path}[{number}]")


def _fields_of(model: Any) -> dict[str, FieldInfo] | None:
    """Return the fields of a pydantic model or dataclass, or None for any other type."""
    if not isinstance(model, type):
        return None
    if issubclass(model, BaseModel):
        return model.model_fields
    return model.__pydantic_fields__ if is_pydantic_dataclass(model) else None


def _model_in(annotation: Any) -> type | None:
    """Return the first pydantic class in an annotation such as `Optional[List[Model]]`, or None."""
    if _fields_of(annotation) is not None:
        model: type = annotation
        return model
    return next(filter(None, map(_model_in, get_args(annotation))), None)

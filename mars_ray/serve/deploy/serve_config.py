"""Settings of the endpoint: the `args` of the application in a Serve config file.

In:    the parsed YAML.
Out:   frozen settings; unknown names and impossible values raise errors when they are read.
Never: repeats a setting of Ray Serve: replicas, autoscaling, host and port belong in Serve's own fields.
"""

from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from mars_ray.adapter.card import AdapterCard, decoding_card, resolve_adapter, resolve_adapters
from mars_ray.control.control_settings import ControlPlan
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.errors import ConfigError
from mars_ray.model.card import accuracies, agreements
from mars_ray.model.resolve import short_name
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.serve.deploy.model_settings import ModelSettings, absolute_model
from mars_ray.serve.middleware.allowed_hosts import host_of
from mars_ray.serve.middleware.key_store import open_key_file

T = TypeVar("T", bound=ModelSettings)

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class ServeConfig(ModelSettings):
    """Settings of an endpoint and of its main model, which answers requests that name no model."""

    deployments: ClassVar[tuple[str, ...]] = ("Gateway", "Engine")
    """Names of the deployments of the application: the HTTP gateway, the engines."""

    name: str | None = None
    """Name of the model in the API; None means the name of its folder."""
    model_wait_s: float = Field(30.0, ge=0)
    """Maximum seconds that a request waits for the first engine of its model. Then it is refused with a
    `Retry-After`."""
    controller: str | None = None
    """Name of the controller that sets the thresholds. Deployments with the same controller and the same settings are
    controlled together. Of endpoints with a platform each needs a controller of its own, under whose name models,
    adapters, batches and usage are stored. None means the controller of the Serve application."""
    migration_limit: int = Field(2, ge=0)
    """Maximum number of times that a begun stream moves to another replica because its replica died. At 0, the stream
    ends with an error."""
    limits: RequestLimits = RequestLimits()
    keys: Path | None = None
    """YAML file of API keys, which every node must have. An endpoint without keys listens on the loopback interface
    only."""
    allowed_hosts: frozenset[str] = LOOPBACK
    """Names that the endpoint accepts in the Host header; '*' accepts all."""
    web: bool = True
    """Serve the playground at `/` and the live view at `/cluster`. The pages need no key, but their requests do."""
    log_prompts: bool = False
    """Write prompts into the request log."""

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _at_least_one_host(cls, hosts: Any) -> Any:
        if not hosts:
            raise ValueError("name at least one host")
        return hosts

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_can_match(cls, hosts: frozenset[str]) -> frozenset[str]:
        for name in hosts - {"*"}:
            host_of(name)
        return hosts

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = self.all_names()
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice!r} names two models or adapters; names must differ")
        return self

    def all_names(self) -> list[str]:
        """Return the names that callers may request."""
        return self.names(self.model_name)

    @property
    def knows_callers(self) -> bool:
        """Whether only callers with a key or a token have access."""
        return self.keys is not None

    @property
    def audit_folder(self) -> str | None:
        """Folder or URL of the log of operators' acts; None means that they go to the process's log only."""
        return None

    def absolute_paths(self) -> dict[str, Any]:
        """Return the settings that hold paths, with these paths made absolute."""
        paths: dict[str, Any] = {"keys": str(self.keys.expanduser().absolute())} if isinstance(self.keys, Path) else {}
        return paths | absolute_model(self)

    def check_keys(self) -> None:
        """Raise a `DataError` or `ConfigError` for keys that cannot be used."""
        if self.keys is not None:
            open_key_file(self.keys).read().check_classes(self.class_names)

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
        """Return the control plan for the model in `folder`.

        Raises `ModelError` if the card is invalid, and `ConfigError` for a limit on lost accuracy that cannot be kept,
        because a class has a floor and the model no calibrated accuracy.
        """
        card = decoding_card(folder, resolve_adapter(self.adapter))
        points = card.calibration if card else ()
        plan = ControlPlan(
            model=self.model,
            settings=self.control,
            ceiling=self.threshold,
            classes=self.classes,
            agreement=agreements(points),
            accuracy=accuracies(points),
            lenient=isinstance(card, AdapterCard),
        )
        falls = self.control.policy == "capacity"
        limited = falls and "max_accuracy_loss" in self.control.model_fields_set and not plan.accuracy
        for name, floor in ((service_class.name, service_class.floor) for service_class in self.classes):
            if limited and floor is not None and floor < self.threshold:
                raise ConfigError(
                    f"control.max_accuracy_loss is {self.control.max_accuracy_loss:g}, but no calibration says how "
                    f"many right answers {self.model} loses, and class {name} may fall to its floor {floor:g}. "
                    "Calibrate the model on tasks (`mars-ray calibrate`), or leave the limit out."
                )
        return plan


def parse_config(settings: type[T], fields: dict[str, Any], source: str = "args", path: str = "") -> T:
    """Return the settings in `fields`.

    Raises a `ConfigError` that names `source` and the first wrong field by its full path, which begins with `path`.
    """
    check_names(settings, fields, source, path)
    try:
        return settings.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(filter(None, (path, *map(str, first["loc"]))))
        reason = first["msg"].removeprefix("Value error, ").removesuffix(".")
        if first["loc"]:  # otherwise the reason is about several fields, and names them
            reason += f"; it is {first['input']!r}"
        raise ConfigError(": ".join(filter(None, (source, name, reason))) + ".") from None


def check_exposure(host: str, config: ServeConfig) -> None:
    """Raise a `ConfigError` if other machines could reach an endpoint without keys."""
    if not config.knows_callers and host not in LOOPBACK:
        raise ConfigError(
            f"the host is {host!r} and there are no API keys: everyone who can reach this machine could use the model. "
            "Set keys (see docs/serve.md), or listen on 127.0.0.1."
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
        annotation = model_fields[name].annotation
        inner_model = _model_in(annotation)
        inner_path = f"{path}.{name}" if path else name
        if inner_model and isinstance(value, dict) and get_origin(annotation) is dict:
            for key, item in value.items():
                check_names(inner_model, item, source, f"{inner_path}.{key}")
        elif inner_model and isinstance(value, dict):
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

"""The models and adapters of an endpoint: the registry of what operators want, and the directory of what is served.

In:    the config of the endpoint; changes of operators; new versions that can answer, or cannot start.
Out:   a new registry for each change, as JSON that survives the endpoint; a directory that gateways follow.
Never: has a name twice, or loses the version that answers when a change fails.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from pydantic import BaseModel

from mars_ray.errors import ConfigError, UnknownNameError, did_you_mean
from mars_ray.platform.platform_config import Access, AddedModel, PlatformConfig

NAME = r"^[A-Za-z0-9][A-Za-z0-9._/@:-]{0,127}$"
"""Pattern of names that are given at run time."""
ModelState = Literal["ready", "loading", "failed"]


class ModelVersion(BaseModel, extra="forbid"):
    """Settings of a model under a number that no other version of any model has."""

    number: int
    settings: AddedModel


class RegisteredModel(BaseModel, extra="forbid"):
    """A further model of the endpoint."""

    current: ModelVersion
    """The version that answers."""
    new: ModelVersion | None = None
    """The version that starts and then takes over."""
    note: str = ""
    """What became of the last new version."""


class Registry(BaseModel, extra="forbid"):
    """The models of an endpoint at one moment. Public methods return a changed copy, and raise `ConfigError` for a
    change that is not possible."""

    main: str
    """Name of the main model, which belongs to the config."""
    served_names: tuple[str, ...] = ()
    """Further names of the main model."""
    models: dict[str, RegisteredModel] = {}
    adapters: dict[str, dict[str, str]] = {}
    """Names and pinned folders of the adapters of each model."""
    access: Access = {}
    next_number: int = 1
    config: str = ""
    """Digest of the models in the config, so that a changed config takes effect again."""

    @classmethod
    def of_config(cls, config: PlatformConfig, before: "Registry | None" = None) -> "Registry":
        """Return `before` if it came from the same models in the config, else a registry of the config's models."""
        declared = {"name", "model", "served_model_names", "adapters", "access", "models"}
        digest = sha256(config.model_dump_json(include=declared).encode()).hexdigest()
        if before and before.config == digest:
            return before
        registry = cls(
            main=config.model_name,
            served_names=config.served_model_names,
            models={},
            adapters={config.model_name: dict(config.adapters)},
            access=dict(config.access),
            next_number=before.next_number if before else 1,
            config=digest,
        )
        for name, model in config.models.items():
            registry._add(name, model)
            kept = before.models.get(name) if before else None
            if kept and kept.current.settings == model:  # its engines go on
                registry.models[name] = kept
        return registry

    def names(self) -> Iterator[str]:
        """Yield all names that a caller may request, now or once a new version has started."""
        yield self.main
        yield from self.served_names
        for name, model in self.models.items():
            yield name
            yield from model.current.settings.served_model_names
            if model.new:
                yield from {*model.new.settings.served_model_names, *model.new.settings.adapters}.difference(
                    model.current.settings.served_model_names, self.adapters[name]
                )
        for adapters in self.adapters.values():
            yield from adapters

    def with_model(self, name: str, settings: AddedModel) -> "Registry":
        """Add a model, or a new version of one, which replaces a new version that still starts."""
        if name == self.main:
            raise ConfigError(
                f"{name!r} is the main model of the endpoint: change its config file and deploy it again."
            )
        try:
            settings.check_access(name, self.adapters.get(name, ()))
        except ValueError as error:
            raise ConfigError(f"{error}.") from None
        names = [*settings.served_model_names, *settings.adapters]
        changed = self.model_copy(deep=True)
        if model := changed.models.get(name):
            own = {*model.current.settings.served_model_names, *self.adapters[name]}
            if model.new:  # the version that this one replaces
                own |= {*model.new.settings.served_model_names, *model.new.settings.adapters}
            self._check_free(sorted(set(names).difference(own)))
            model.new = changed._version(settings)
            model.note = ""
        else:
            self._check_free([name, *names])
            changed._add(name, settings)
        return changed

    def with_adapter(self, model: str, name: str, folder: str, accounts: tuple[str, ...] | None) -> "Registry":
        """Add an adapter of `model`, or replace it. `accounts` may use it; None means all."""
        if model not in self.adapters:
            raise self._unknown(model, self.adapters)
        if name not in self.adapters[model]:
            self._check_free([name])
        changed = self._without_access({name})
        changed.adapters[model][name] = folder
        if accounts is not None:
            changed.access[name] = accounts
        return changed

    def without(self, name: str) -> "Registry":
        """Remove a model with its adapters, or an adapter."""
        if name == self.main or name in self.served_names:
            raise ConfigError(f"{name!r} is the main model of the endpoint, which cannot be removed.")
        if model := self.models.get(name):
            changed = self._without_access({name, *model.current.settings.served_model_names, *self.adapters[name]})
            del changed.models[name], changed.adapters[name]
            return changed
        changed = self._without_access({name})
        adapters = next((adapters for adapters in changed.adapters.values() if name in adapters), None)
        if adapters is None:
            raise self._unknown(name, [*self.models, *(name for named in self.adapters.values() for name in named)])
        del adapters[name]
        return changed

    def promoted(self, name: str, note: str) -> "Registry":
        """Replace the present version of a model by its new one. Adapters that stay keep the accounts that may use
        them."""
        version = self.models[name].new
        assert version
        kept = self.adapters[name].keys() - version.settings.adapters.keys()
        changed = self._without_access(self.models[name].current.settings.access.keys() - kept)
        changed.models[name] = RegisteredModel(current=version, note=note)
        changed.adapters[name] |= version.settings.adapters
        changed.access |= version.settings.access
        return changed

    def taken_back(self, name: str, note: str) -> "Registry":
        """Drop the new version of a model."""
        changed = self.model_copy(deep=True)
        changed.models[name] = RegisteredModel(current=changed.models[name].current, note=note)
        return changed

    def _add(self, name: str, settings: AddedModel) -> None:
        self.models[name] = RegisteredModel(current=self._version(settings))
        self.adapters[name] = dict(settings.adapters)
        self.access |= settings.access

    def _version(self, settings: AddedModel) -> ModelVersion:
        version = ModelVersion(number=self.next_number, settings=settings)
        self.next_number += 1
        return version

    def _without_access(self, names: Collection[str]) -> "Registry":
        """Return a copy in which all accounts may use these names."""
        changed = self.model_copy(deep=True)
        changed.access = {name: accounts for name, accounts in self.access.items() if name not in names}
        return changed

    def _check_free(self, names: list[str]) -> None:
        taken = set(self.names())
        for name in names:
            if name in taken or names.count(name) > 1:
                raise ConfigError(f"{name!r} names a model or adapter already; choose another name.")

    @staticmethod
    def _unknown(name: str, known: Mapping[str, object] | list[str]) -> UnknownNameError:
        return UnknownNameError(f"there is no model or adapter {name!r}.{did_you_mean(name, known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The present version of a further model of an endpoint."""

    name: str
    served_names: tuple[str, ...]
    state: ModelState
    """`ready` once the engines run."""
    reason: str = ""
    """Why the model is not ready, or what became of its last new version."""
    number: int
    new_number: int | None = None
    """Number of the new version, which starts and then takes over."""
    application: str
    """Name of the Serve application of the engines."""
    config: PlatformConfig
    """Settings of an endpoint that has this model alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """All models and adapters of an endpoint at one moment, which gateways follow."""

    revision: int = 0
    """Rises with every change; 0 before the first directory has come."""
    served_names: tuple[str, ...] = ()
    """Further names of the main model."""
    models: tuple[ServedModel, ...] = ()
    adapters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the adapters of each model, the main one included."""
    access: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Accounts that may use a model or an adapter, by name. Names without an entry are open to all."""

    @property
    def ready(self) -> dict[str, ServedModel]:
        """The models whose engines run, by the names of their applications."""
        return {model.application: model for model in self.models if model.state == "ready"}

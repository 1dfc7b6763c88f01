"""The models and adapters of an endpoint as operators want them, and the versions of each model.

In:    the config of the endpoint; changes of operators; new versions that can answer, or cannot start.
Out:   a new registry for each change; JSON that survives the endpoint.
Never: has a name twice, or loses the version that answers when a change fails.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256

from pydantic import BaseModel, ConfigDict

from mars_ray.errors import ConfigError, UnknownNameError, did_you_mean
from mars_ray.platform.models.model_settings import AddedModel
from mars_ray.platform.platform_config import PlatformConfig

NAME = r"^[A-Za-z0-9][A-Za-z0-9._/@:-]{0,127}$"
"""Pattern of names that are given at run time."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelVersion(_Frozen):
    """Settings of a model under a number that no other version of any model has."""

    number: int
    settings: AddedModel


class RegisteredModel(_Frozen):
    """A further model of the endpoint."""

    current: ModelVersion
    """The version that answers."""
    new: ModelVersion | None = None
    """The version that starts and then takes over."""
    note: str = ""
    """What became of the last new version."""


class Registry(_Frozen):
    """The models of an endpoint at one moment. Methods return a changed copy, and raise `ConfigError` for a change that
    is not possible."""

    main: str
    """Name of the main model, which belongs to the config."""
    served_names: tuple[str, ...] = ()
    """Further names of the main model."""
    models: Mapping[str, RegisteredModel] = {}
    adapters: Mapping[str, Mapping[str, str]] = {}
    """Names and pinned folders of the adapters of each model."""
    access: Mapping[str, tuple[str, ...]] = {}
    """Accounts that may use a model or an adapter, by name."""
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
            adapters={config.model_name: dict(config.adapters)},
            access=dict(config.access),
            next_number=before.next_number if before else 1,
            config=digest,
        )
        for name, model in config.models.items():
            registry = registry._with_new(name, model)
            kept = before.models.get(name) if before else None
            if kept and kept.current.settings == model:  # its engines go on
                registry = registry._set(name, kept)
        return registry

    def names(self) -> Iterator[str]:
        """Yield all names that a caller may request."""
        yield self.main
        yield from self.served_names
        for name, model in self.models.items():
            yield name
            yield from model.current.settings.served_model_names
        for adapters in self.adapters.values():
            yield from adapters

    def with_model(self, name: str, settings: AddedModel) -> "Registry":
        """Add a model, or a new version of one, which replaces a new version that still starts."""
        if name == self.main:
            raise ConfigError(
                f"{name!r} is the main model of the endpoint: change its config file and deploy it again."
            )
        model = self.models.get(name)
        if model is None:
            self._check_free([name, *settings.served_model_names, *settings.adapters])
            return self._with_new(name, settings)
        new = {*settings.served_model_names, *settings.adapters}
        self._check_free(sorted(new.difference(model.current.settings.served_model_names, self.adapters[name])))
        version = ModelVersion(number=self.next_number, settings=settings)
        changed = model.model_copy(update={"new": version, "note": ""})
        return self._set(name, changed).model_copy(update={"next_number": self.next_number + 1})

    def with_adapter(self, model: str, name: str, folder: str, accounts: tuple[str, ...] | None) -> "Registry":
        """Add an adapter of `model`, or replace it. `accounts` may use it; None means all."""
        if model not in self.adapters:
            raise self._unknown(model, self.adapters)
        if name not in self.adapters[model]:
            self._check_free([name])
        adapters = {**self.adapters, model: {**self.adapters[model], name: folder}}
        access = {served_name: allowed for served_name, allowed in self.access.items() if served_name != name}
        if accounts is not None:
            access[name] = accounts
        return self.model_copy(update={"adapters": adapters, "access": access})

    def without(self, name: str) -> "Registry":
        """Remove a model with its adapters, or an adapter."""
        if name == self.main or name in self.served_names:
            raise ConfigError(f"{name!r} is the main model of the endpoint, which cannot be removed.")
        gone = {name}
        models, adapters = dict(self.models), dict(self.adapters)
        if model := models.pop(name, None):
            gone |= {*model.current.settings.served_model_names, *adapters.pop(name)}
        else:
            owner = next((base for base, named in adapters.items() if name in named), None)
            if owner is None:
                known = [*self.models, *(adapter for named in self.adapters.values() for adapter in named)]
                raise self._unknown(name, known)
            adapters[owner] = {adapter: folder for adapter, folder in adapters[owner].items() if adapter != name}
        access = {served_name: accounts for served_name, accounts in self.access.items() if served_name not in gone}
        return self.model_copy(update={"models": models, "adapters": adapters, "access": access})

    def promoted(self, name: str, note: str) -> "Registry":
        """Replace the present version of a model by its new one."""
        version = self.models[name].new
        assert version
        settings = version.settings
        changed = RegisteredModel(current=version, note=note)
        access = {
            served_name: accounts
            for served_name, accounts in self.access.items()
            if served_name not in self.models[name].current.settings.access
        }
        return self._set(name, changed).model_copy(
            update={
                "adapters": {**self.adapters, name: {**self.adapters[name], **settings.adapters}},
                "access": access | settings.access,
            }
        )

    def taken_back(self, name: str, note: str) -> "Registry":
        """Drop the new version of a model."""
        return self._set(name, self.models[name].model_copy(update={"new": None, "note": note}))

    def _with_new(self, name: str, settings: AddedModel) -> "Registry":
        model = RegisteredModel(current=ModelVersion(number=self.next_number, settings=settings))
        return self._set(name, model).model_copy(
            update={
                "next_number": self.next_number + 1,
                "adapters": {**self.adapters, name: dict(settings.adapters)},
                "access": {**self.access, **settings.access},
            }
        )

    def _set(self, name: str, model: RegisteredModel) -> "Registry":
        return self.model_copy(update={"models": {**self.models, name: model}})

    def _check_free(self, names: list[str]) -> None:
        taken = set(self.names())
        for name in names:
            if name in taken or names.count(name) > 1:
                raise ConfigError(f"{name!r} names a model or adapter already; choose another name.")

    @staticmethod
    def _unknown(name: str, known: Mapping[str, object] | list[str]) -> UnknownNameError:
        return UnknownNameError(f"there is no model or adapter {name!r}{did_you_mean(name, known)}.")

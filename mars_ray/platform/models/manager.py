"""Keeps the engines of an endpoint's further models as the registry wants them.

In:    changes of operators; the directories that gateways have; the states of the Serve applications.
Out:   applications to deploy and to delete; the directory that gateways follow.
Never: deletes engines that a gateway may still call, or forgets a change once it has returned.

A gateway follows the directory twice a second. Engines that are no longer in it are deleted once every gateway has
taken a directory without them.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from mars_ray.errors import ConfigError, MarsRayError, OutputError, UnknownNameError, did_you_mean
from mars_ray.model.resolve import resolve_model
from mars_ray.platform.models.registry import Directory, ModelVersion, RegisteredModel, Registry, ServedModel
from mars_ray.platform.platform_config import AddedModel, PlatformConfig
from mars_ray.serve.deploy.model_settings import ModelSettings
from mars_ray.storage.audit_log import AuditLog
from mars_ray.storage.document import Document

log = logging.getLogger(__name__)

GATEWAY_S = 10.0
"""Seconds after which a gateway that no longer follows is gone. A new manager waits as long for the gateways."""
SILENCE_S = 0.75 * GATEWAY_S
"""Seconds between two steps after which gateways may only seem to have ended."""


class ApplicationState(NamedTuple):
    """State of one Serve application."""

    status: Literal["deploying", "running", "failed", "deleting"]
    message: str = ""


class Applications(Protocol):
    """The Serve applications of the endpoint's further models."""

    def states(self) -> Mapping[str, ApplicationState]:
        """Return the state of each application by name."""

    def deploy(self, name: str, config: PlatformConfig, settings: AddedModel) -> None:
        """Begin to deploy the engines of a model. Raises `MarsRayError`."""

    def delete(self, name: str) -> None:
        """Begin to delete an application; its running requests may finish."""

    def set_adapters(self, name: str, adapters: Mapping[str, str]) -> None:
        """Store the adapters of a model, which its engines follow. `name` is the controller of the model."""


def application_prefix(controller: str) -> str:
    """Return the beginning of the names of the applications of the endpoint with this controller."""
    return f"{controller}-model-"


@dataclass(slots=True)
class _Gateway:
    revision: int
    seen_s: float


class ModelManager:
    """The manager of one endpoint. Use it in one thread at a time. `config` names the controller."""

    def __init__(
        self,
        config: PlatformConfig,
        document: Document,
        applications: Applications,
        audit: AuditLog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._document = document
        self._applications = applications
        self._audit = audit
        self._clock = clock
        self._began_s = clock()
        """Time since which this manager hears every gateway."""
        self._stepped_s = self._began_s
        self._gateways: dict[str, _Gateway] = {}
        self._stored: dict[str, Mapping[str, str]] = {}
        self._failed: dict[str, str] = {}
        """Applications that may not run or could not be deployed, with the reason."""
        self._directory = Directory(revision=time.time_ns())
        self._dropped: dict[str, int] = {}
        """Revision from which on an application is in no directory."""
        content = document.read()
        before = Registry.model_validate_json(content.data) if content.version else None
        self._version = content.version
        self.registry = before or Registry(main=config.model_name)
        self._save(Registry.of_config(config, before))
        self._failed = self._refused()
        self.step()

    # What gateways do.

    def follow(self, gateway: str, revision: int) -> Directory | None:
        """Return the directory unless the gateway has it: the one with `revision`."""
        self._gateways[gateway] = _Gateway(revision, self._clock())
        return None if revision == self._directory.revision else self._directory

    # What operators do.

    def settings_of(self, name: str) -> ModelSettings:
        """Return the settings of a model. Raises `UnknownNameError`."""
        if name == self.registry.main:
            return self._config
        if name not in self.registry.models:
            raise UnknownNameError(f"there is no model {name!r}.{did_you_mean(name, self.registry.models)}")
        return self.registry.models[name].current.settings

    def change(self, by: str, action: str, subject: str, method: str, *args: Any) -> None:
        """Change the registry by one of its methods, and record the act.

        Raises `ConfigError` and `OutputError`, and `ModelError` if a card of a new model cannot be read.
        """
        if method == Registry.with_model.__name__:
            self._check_model(*args)
        self._save(getattr(self.registry, method)(*args))
        self._failed = self._refused()
        self._audit.record(by, action, subject)
        self.step()

    def _check_model(self, name: str, settings: AddedModel) -> None:
        try:
            self._config.check_classes(name, settings)
        except ValueError as error:
            raise ConfigError(f"{error}.") from None
        if "max_accuracy_loss" in settings.control.model_fields_set:  # the only setting that needs a calibration
            config = self._config.of_model(name, settings).model_copy(update={"model": name})  # the name for errors
            config.plan(resolve_model(settings.model))

    def _refused(self) -> dict[str, str]:
        """Return the applications that may not run, with the reason.

        Since a model was stored, the config may have raised a floor above its threshold.
        """
        refused = {}
        for application, (config, settings) in self._wanted().items():
            try:
                # A model with classes of its own may lack a new one: its engines refuse only requests of that class.
                if "classes" not in settings.model_fields_set:
                    self._config.check_classes(config.model_name, settings)
            except ValueError as error:
                refused[application] = str(error)
        return refused

    # Once or twice a second.

    def step(self) -> None:
        """Bring the applications closer to what the registry wants."""
        states = dict(self._applications.states())
        try:
            self._replace_versions(states)
        except MarsRayError as error:  # the storage is away: the next step tries again, and other models go on
            log.error("new versions cannot take over or be taken back yet: %s", error)
        self._store_adapters()
        wanted = self._wanted()
        for name, (config, settings) in wanted.items():
            if name not in states and name not in self._failed:
                try:
                    self._applications.deploy(name, config, settings)
                    states[name] = ApplicationState("deploying")
                except MarsRayError as error:
                    self._failed[name] = str(error)
        self._publish(states)
        self._delete_unwanted(states, wanted)

    def _replace_versions(self, states: Mapping[str, ApplicationState]) -> None:
        """Let new versions that run take over, and drop those that cannot start.

        Raises a `MarsRayError` if the registry cannot be stored.
        """
        for name, model in self.registry.models.items():
            if model.new is None:
                continue
            state, failure = self._state(model.new, states)
            number = model.new.number
            if failure:
                note = f"version {number} was taken back: {failure}"
                self._save(self.registry.taken_back(name, note))
                self._audit.record("policy", "model.taken_back", name, cause=note)
            elif state.status == "running":
                self._save(self.registry.promoted(name, f"version {number} took over"))
                self._audit.record("policy", "model.promoted", name, cause=f"version {number} is ready")

    def _store_adapters(self) -> None:
        for name, adapters in self.registry.adapters.items():
            if self._stored.get(name) != adapters:
                self._applications.set_adapters(self._controller(name), adapters)
                self._stored[name] = dict(adapters)

    def _controller(self, name: str) -> str:
        main = str(self._config.controller)
        return main if name == self.registry.main else f"{main}:{name}"

    def _application(self, version: ModelVersion) -> str:
        return f"{application_prefix(str(self._config.controller))}{version.number}"

    def _state(self, version: ModelVersion, states: Mapping[str, ApplicationState]) -> tuple[ApplicationState, str]:
        """Return the state of a version's application, and why it cannot run; empty unless it has failed."""
        name = self._application(version)
        state = states.get(name, ApplicationState("deploying"))
        return state, self._failed.get(name) or (state.message if state.status == "failed" else "")

    def _wanted(self) -> dict[str, tuple[PlatformConfig, AddedModel]]:
        """Return the settings of each application that should run."""
        return {
            self._application(version): (self._config.of_model(name, version.settings), version.settings)
            for name, model in self.registry.models.items()
            for version in (model.current, model.new)
            if version
        }

    # The directory.

    def _publish(self, states: Mapping[str, ApplicationState]) -> None:
        directory = Directory(
            revision=self._directory.revision,
            served_names=self.registry.served_names,
            models=tuple(self._served(name, model, states) for name, model in self.registry.models.items()),
            adapters={name: tuple(adapters) for name, adapters in self.registry.adapters.items()},
            access=dict(self.registry.access),
        )
        if directory != self._directory:
            self._directory = replace(directory, revision=self._directory.revision + 1)

    def _served(self, name: str, model: RegisteredModel, states: Mapping[str, ApplicationState]) -> ServedModel:
        current, failure = self._state(model.current, states)
        runs = current.status == "running" and not failure
        return ServedModel(
            name=name,
            served_names=model.current.settings.served_model_names,
            state="failed" if failure else "ready" if runs else "loading",
            reason=failure or (model.note if runs else current.message),
            number=model.current.number,
            new_number=model.new.number if model.new else None,
            application=self._application(model.current),
            config=self._config.of_model(name, model.current.settings),
        )

    def _delete_unwanted(
        self, states: Mapping[str, ApplicationState], wanted: Mapping[str, tuple[PlatformConfig, AddedModel]]
    ) -> None:
        now_s = self._clock()
        if now_s - self._stepped_s > SILENCE_S:  # it was busy, and heard no gateway meanwhile
            self._began_s = now_s
        self._stepped_s = now_s
        self._gateways = {
            name: gateway for name, gateway in self._gateways.items() if now_s - gateway.seen_s < GATEWAY_S
        }
        self._dropped = {name: since for name, since in self._dropped.items() if name in states and name not in wanted}
        for name, state in states.items():
            if name in wanted or state.status == "deleting":
                continue
            since = self._dropped.setdefault(name, self._directory.revision)
            followed = all(gateway.revision >= since for gateway in self._gateways.values())
            if followed and now_s - self._began_s >= GATEWAY_S:
                self._applications.delete(name)

    def _save(self, registry: Registry) -> None:
        """Keep a changed registry. Raises `OutputError`, and then changes nothing."""
        if registry == self.registry and self._version is not None:
            return
        data = registry.model_dump_json(exclude_unset=True).encode()  # left out, classes are the endpoint's
        if not self._document.swap(self._version, data):
            # Another manager, of an older deployment, has written meanwhile. Its gateways are gone soon.
            self._version = self._document.version()
            if not self._document.swap(self._version, data):
                raise OutputError(f"{self._document.name} was changed by others meanwhile. Try again.")
        self._version = self._document.version()
        self.registry = registry

"""Keeps the engines of an endpoint's further models as the registry wants them.

In:    changes of operators; what gateways used and measured; the states of the Serve applications.
Out:   applications to deploy and to delete; the directory that gateways follow.
Never: deletes engines that a gateway may still call, exceeds the memory bound with models that it can let sleep, or
       forgets a change once it has returned.

A gateway follows the directory once a second. Engines that are no longer in it are deleted once every gateway has
taken a directory without them.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mars_ray.errors import MarsRayError, UnknownNameError, did_you_mean
from mars_ray.platform.models.applications import Applications, ApplicationState, application_prefix
from mars_ray.platform.models.canary import CanaryJudge, CanaryReport
from mars_ray.platform.models.directory import Directory, ModelState, ServedModel, ServedVersion
from mars_ray.platform.models.model_settings import AddedModel
from mars_ray.platform.models.registry import ModelVersion, RegisteredModel, Registry
from mars_ray.platform.platform_config import PlatformConfig
from mars_ray.serve.deploy.model_settings import ModelSettings
from mars_ray.storage.audit_log import AuditLog
from mars_ray.storage.document import Document

log = logging.getLogger(__name__)

GATEWAY_S = 10.0
"""Seconds after which a gateway that no longer follows is gone. A new manager waits as long for the gateways."""
GIB = 2**30


@dataclass(slots=True)
class _Gateway:
    revision: int
    seen_s: float


class ModelManager:
    """The manager of one endpoint. Use it in one thread at a time.

    `config` names the controller. `weight_bytes` returns the size of a model's weights, by the name of the model.
    """

    def __init__(
        self,
        config: PlatformConfig,
        document: Document,
        applications: Applications,
        audit: AuditLog,
        *,
        weight_bytes: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._document = document
        self._applications = applications
        self._audit = audit
        self._weight_bytes = weight_bytes
        self._clock = clock
        self._began_s = clock()
        self._gateways: dict[str, _Gateway] = {}
        self._used_s: dict[str, float] = {}
        """Time of the last use of each model; now for one that is in use."""
        self._judges: dict[str, CanaryJudge] = {}
        self._stored: dict[str, Mapping[str, str]] = {}
        self._sizes: dict[str, int] = {}
        """Bytes of weights of each application."""
        self._failed: dict[str, str] = {}
        """Applications that could not be deployed, with the reason."""
        self._directory = Directory(revision=time.time_ns())
        self._dropped: dict[str, int] = {}
        """Revision from which on an application is in no directory."""
        content = document.read()
        before = Registry.model_validate_json(content.data) if content.version else None
        self._version = content.version
        self.registry = before or Registry(main=config.model_name)
        self._save(Registry.of_config(config, before))
        self.step()

    # What gateways do.

    def follow(self, gateway: str, revision: int, idle_s: Mapping[str, float]) -> Directory | None:
        """Return the directory unless the gateway has it: the one with `revision`.

        `idle_s` are the seconds since the gateway last used each model, 0 for those in use.
        """
        now_s = self._clock()
        self._gateways[gateway] = _Gateway(revision, now_s)
        for name, seconds in idle_s.items():
            self._used_s[name] = max(self._used_s.get(name, 0.0), now_s - seconds)
        return None if revision == self._directory.revision else self._directory

    def wake(self, name: str) -> None:
        """Wake a model because a request waits for it."""
        model = self.registry.models.get(name)
        if model and model.asleep:
            self._used_s[name] = self._clock()
            self._save(self.registry.with_sleep(name, False))
            self.step()

    def report(self, name: str, reports: Sequence[CanaryReport]) -> None:
        """Take what a gateway measured of the versions of a model."""
        for report in reports:
            if judge := self._judges.get(name):
                judge.add(report)

    # What operators do.

    def settings_of(self, name: str) -> ModelSettings:
        """Return the settings of a model. Raises `UnknownNameError`."""
        if name == self.registry.main:
            return self._config
        if name not in self.registry.models:
            raise UnknownNameError(f"there is no model {name!r}{did_you_mean(name, self.registry.models)}.")
        return self.registry.models[name].current.settings

    def change(self, by: str, action: str, subject: str, method: str, *args: Any) -> None:
        """Change the registry by one of its methods, and record the act. Raises `ConfigError` and `OutputError`."""
        self._save(getattr(self.registry, method)(*args))
        self._failed = {}
        self._audit.record(by, action, subject)
        self.step()

    def describe(self) -> Directory:
        """Return the directory, with what is known of canaries so far."""
        models = [
            replace(model, reason=self._judges[model.name].summary()) if model.name in self._judges else model
            for model in self._directory.models
        ]
        return replace(self._directory, models=tuple(models))

    # Once or twice a second.

    def step(self) -> None:
        """Bring the applications closer to what the registry wants."""
        states = dict(self._applications.states())
        self._decide_canaries(states)
        self._let_sleep()
        self._store_adapters()
        wanted = self._wanted()
        for name, (config, settings) in wanted.items():
            if name not in states and name not in self._failed and self._fits(config.model_name, settings, states):
                try:
                    self._applications.deploy(name, config, settings)
                    states[name] = ApplicationState("deploying")
                except MarsRayError as error:
                    self._failed[name] = str(error)
        self._publish(states)
        self._delete_unwanted(states, wanted)

    def _decide_canaries(self, states: Mapping[str, ApplicationState]) -> None:
        for name, model in self.registry.models.items():
            candidate = model.candidate
            if candidate is None:
                self._judges.pop(name, None)
                continue
            present, new = model.current.number, candidate.version.number
            judge = self._judges.get(name)
            if judge is None or (judge.present, judge.new) != (present, new):
                judge = self._judges[name] = CanaryJudge(present, new, candidate.canary)
            state, failure = self._state(candidate.version, states)
            verdict = judge.verdict()
            if failure:
                self._take_back(name, f"version {new} was taken back: {failure}")
            elif state.status == "running" and candidate.canary.share == 1:
                self._save(self.registry.promoted(name, f"version {new} took over"))
                self._audit.record("policy", "model.promoted", name, cause=f"version {new} is ready")
            elif verdict and verdict.promote:
                self._save(self.registry.promoted(name, f"version {new} took over: {verdict.reason}"))
                self._audit.record("policy", "model.promoted", name, cause=verdict.reason)
            elif verdict:
                self._take_back(name, f"version {new} was taken back: {verdict.reason}")

    def _take_back(self, name: str, note: str) -> None:
        self._save(self.registry.taken_back(name, note))
        self._audit.record("policy", "model.taken_back", name, cause=note)

    def _let_sleep(self) -> None:
        now_s = self._clock()
        for name, model in self.registry.models.items():
            after_s = model.current.settings.sleep_after_s
            if after_s is not None and self._may_sleep(name, model) and now_s - self._used(name) > after_s:
                self._save(self.registry.with_sleep(name, True))

    def _may_sleep(self, name: str, model: RegisteredModel) -> bool:
        ready = any(served.name == name and served.state == "ready" for served in self._directory.models)
        return ready and not model.asleep and model.candidate is None

    def _used(self, name: str) -> float:
        return self._used_s.setdefault(name, self._clock())

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
            if not model.asleep
            for version in _versions(model)
        }

    # Memory.

    def _fits(self, name: str, settings: AddedModel, states: Mapping[str, ApplicationState]) -> bool:
        """Return whether the weights of a model fit now. If not, let the model sleep that was used longest ago."""
        if self._config.models_memory_gib is None:
            return True
        bound = self._config.models_memory_gib * GIB
        needed = self._bytes(settings)
        for model in self.registry.models.values():
            for version in _versions(model):
                self._sizes.setdefault(self._application(version), self._bytes(version.settings))
        # Engines that are being deleted still have their memory.
        if needed + sum(self._sizes.get(application, 0) for application in states) <= bound:
            return True
        now_s = self._clock()
        idle = [
            (self._used(candidate), candidate)
            for candidate, model in self.registry.models.items()
            if candidate != name and self._may_sleep(candidate, model) and now_s - self._used(candidate) > 0
        ]
        if idle and needed <= bound:
            self._save(self.registry.with_sleep(min(idle)[1], True))
        return False

    def _bytes(self, settings: AddedModel) -> int:
        return self._weight_bytes(settings.model) * settings.min_replicas

    def _too_large(self, settings: AddedModel) -> str:
        """Return why the weights of a model never fit; empty if they may."""
        if self._config.models_memory_gib is None:
            return ""
        needed, bound = self._bytes(settings) / GIB, self._config.models_memory_gib
        if needed > bound:
            return f"its weights take {needed:.3g} GiB; models_memory_gib is {bound:g}"
        return ""

    # The directory.

    def _publish(self, states: Mapping[str, ApplicationState]) -> None:
        directory = Directory(
            revision=self._directory.revision,
            models=tuple(self._served(name, model, states) for name, model in self.registry.models.items()),
            adapters={name: tuple(adapters) for name, adapters in self.registry.adapters.items()},
            access=dict(self.registry.access),
        )
        if directory != self._directory:
            self._directory = replace(directory, revision=self._directory.revision + 1)

    def _served(self, name: str, model: RegisteredModel, states: Mapping[str, ApplicationState]) -> ServedModel:
        current, failure = self._state(model.current, states)
        failure = failure or self._too_large(model.current.settings)
        state: ModelState = "loading"
        if model.asleep:
            state = "asleep"
        elif failure:
            state = "failed"
        elif current.status == "running":
            state = "ready"
        running = [version for version in _versions(model) if self._state(version, states)[0].status == "running"]
        new = model.candidate
        share = new.canary.share if new and new.version in running else 0.0
        versions = tuple(
            ServedVersion(
                number=version.number,
                application=self._application(version),
                config=self._config.of_model(name, version.settings),
                share=1 - share if version == model.current else share,
            )
            for version in running
        )
        return ServedModel(
            name=name,
            served_names=model.current.settings.served_model_names,
            state=state,
            reason=failure or current.message or model.note,
            number=model.current.number,
            new_number=new.version.number if new else None,
            versions=versions if state == "ready" else (),
        )

    def _delete_unwanted(
        self, states: Mapping[str, ApplicationState], wanted: Mapping[str, tuple[PlatformConfig, AddedModel]]
    ) -> None:
        now_s = self._clock()
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
            self._document.swap(self._version, data)
        self._version = self._document.version()
        self.registry = registry


def _versions(model: RegisteredModel) -> list[ModelVersion]:
    return [model.current, *([model.candidate.version] if model.candidate else [])]

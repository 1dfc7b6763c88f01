"""The models of a gateway: the main one, and those in the directory that all gateways follow.

In:    the main endpoint; a link to the manager of models; a function that makes the endpoint of a version.
Out:   the endpoint that answers a request, by the name of a model or adapter.
Never: shows a caller a model or an adapter that its account may not use; sends a request to engines that the manager
       may delete.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.errors import MarsRayError, UnavailableError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.platform.models.registry import Directory, ServedModel
from mars_ray.platform.platform_config import Access
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.models import ControlClient, ModelClients, not_running
from mars_ray.serve.http.streams import cancel_tasks

log = logging.getLogger(__name__)
T = TypeVar("T")

FOLLOW_S = 0.5
START_S = 5.0
"""Maximum seconds between two calls of the manager while a gateway gets ready for a version, so that the manager sees
that the gateway lives."""
UNUSED_S = 5.0
"""Idle seconds after which the endpoint of a version that left ends. A request may reach its engine this late, because
its prompt is rendered first and it may wait for the meter."""
LEAVE_S = 120.0
"""Maximum seconds to keep the engines of a version that left, for requests still running."""
RETRY_AFTER_S = 10
"""Retry-After in seconds for a model that is not ready."""


class ModelsLink(Protocol):
    """Way to the manager of models. Every method raises `UnavailableError` while it does not answer."""

    async def follow(self, gateway: str, revision: int) -> Directory | None:
        """Return the directory, unless `revision` is its newest; see `ModelManager`."""

    async def change(self, by: str, action: str, subject: str, method: str, *args: Any) -> None:
        """Change the registry by one of its methods. Raises `ConfigError` and `ModelError`.

        Raises `OutputError` and `DataError` if the registry cannot be written or read.
        """


@dataclass(slots=True)
class _Running:
    """A version whose endpoint runs."""

    clients: ModelClients
    ends: AsyncExitStack
    left_at: int | None = None
    """Revision of the first directory without the version; None while it is in the directory."""
    left_s: float = 0.0
    """Time at which that directory came."""


class ServedModels:
    """The models of one gateway, which is called `gateway`. Without a `link` there is only the main model.

    `access` and `adapters`, those of the main model, are what the settings say.

    Use it within one event loop, inside `async with models.running()`.
    """

    def __init__(
        self,
        main: ModelClients,
        link: ModelsLink | None = None,
        make: Callable[[ServedModel], Awaitable[ModelClients]] | None = None,
        *,
        gateway: str = "",
        wait_s: float = 0.0,
        access: Access | None = None,
        adapters: Iterable[str] = (),
    ) -> None:
        self.main = main.endpoint
        self.link = link
        self._control = main.control
        self._make = make
        self._gateway = gateway
        self._wait_s = wait_s
        self.directory = Directory(adapters={self.main.name: tuple(adapters)} if link else {}, access=access or {})
        """The newest directory; until the first one comes, what the settings and an engine say about the main model."""
        self._running: dict[str, _Running] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self._applying = asyncio.Lock()
        self._infos: dict[str, ModelInfo] = {}
        """Last known facts about each model."""
        if link:  # engines may have other adapters, which the first directory allows to some accounts only
            self._set_adapters(self.directory)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tokenizers and watch the engines of all models within the block. Raises `ModelError`."""
        async with self.main.running():
            following = asyncio.create_task(self._follow()) if self.link else None
            try:
                yield
            finally:
                await cancel_tasks(*([following] if following else []), *self._starting.values())
                for version in self._running.values():
                    await version.ends.aclose()

    async def find(self, name: str | None, account: str) -> Endpoint:
        """Return the endpoint that answers a request for a model or adapter; None means the main model.

        Waits for a model that loads and, unless the main model itself is named, for the first directory. Raises a 404
        for a model that does not exist or that the account may not use, and a 503 if either does not come in time.
        """
        wanted = self.main.name if name is None else name
        await self._learn_names()
        if not self._is_main(wanted):
            await self._first_directory()
        if self._allows(wanted, account):
            if self._is_main(wanted) or wanted in self.directory.adapters.get(self.main.name, ()):
                return self.main
            if model := self._model(wanted):
                return await self._ready(model.name)
        names = ", ".join(repr(info.name) for info in await self.infos(account))
        refused = (
            f"the model {name[:NAME_CHARS]!r} does not exist here" if name else "the request names no model; name one"
        )
        message = f"{refused}. Available: {names}."
        raise ApiError(404, message, type="invalid_request_error", param="model", code="model_not_found")

    async def _learn_names(self) -> None:
        """Take the names of the main model from an engine that is up, until the first directory has them."""
        info = None if self.directory.revision else await _facts(self.main)
        if info and not self.directory.revision:
            adapters = {self.main.name: info.adapters}
            self.directory = replace(self.directory, served_names=info.served_names, adapters=adapters)

    async def _first_directory(self) -> None:
        """Wait until a directory has come, because operators may have added models and made adapters of the config
        private. Raises a 503 if none comes in time."""
        if self.link and not await self._until(lambda: self.directory.revision):
            raise _not_ready("the models and adapters of this endpoint are not known here yet")

    def _is_main(self, name: str) -> bool:
        """Return whether this is a name of the main model itself, whose access only the config determines."""
        return name in (self.main.name, *self.directory.served_names)

    def _allows(self, name: str, account: str) -> bool:
        """Return whether an account may use a model or an adapter. Further names of a model have its accounts unless
        they have their own."""
        served_names = {self.main.name: self.directory.served_names}
        served_names |= {model.name: model.served_names for model in self.directory.models}
        model = next((model for model, names in served_names.items() if name in names), name)
        allowed = self.directory.access.get(name, self.directory.access.get(model))
        return allowed is None or account in allowed

    async def infos(self, account: str) -> list[ModelInfo]:
        """Return the facts about all models and adapters that an account may use. Models without an engine since this
        gateway started are left out, the main one too. Raises a 503 if the first directory does not come in time."""
        await self._first_directory()
        await self._learn_names()
        endpoints = {self.main.name: self.main}
        endpoints |= {model.name: clients.endpoint for model, clients in self._present()}
        for name, endpoint in endpoints.items():
            if info := await _facts(endpoint):
                self._infos[name] = info
        return [
            served
            for name, adapters in self.directory.adapters.items()
            if name in self._infos
            for served in replace(self._infos[name], adapters=adapters).all_names()
            if self._allows(served.name, account)
        ]

    def endpoints(self) -> list[Endpoint]:
        """Return the endpoints of all models."""
        return [self.main, *(version.clients.endpoint for version in self._running.values() if version.left_at is None)]

    def control(self, name: str | None) -> ControlClient:
        """Return the client of the controller of a model; None means the main model. Raises a 404."""
        if name is None or name == self.main.name:
            return self._control
        for model, clients in self._present():
            if model.name == name:
                return clients.control
        raise not_running(name)

    def model_of(self, name: str | None) -> str:
        """Return the name of the model that answers requests for a model or adapter; that of the main model if no other
        model does."""
        model = self._model(name) if name else None
        return model.name if model else self.main.name

    def names(self) -> list[str]:
        """Return the names of the models whose controllers can be asked."""
        return [self.main.name, *(model.name for model, _ in self._present())]

    def _present(self) -> list[tuple[ServedModel, ModelClients]]:
        return [
            (model, self._running[application].clients)
            for application, model in self.directory.ready.items()
            if application in self._running
        ]

    def _model(self, name: str) -> ServedModel | None:
        for model in self.directory.models:
            if name in (model.name, *model.served_names, *self.directory.adapters.get(model.name, ())):
                return model
        return None

    async def _ready(self, name: str) -> Endpoint:
        if endpoint := await self._until(lambda: self._endpoint(name)):
            return endpoint
        model = self._model(name)
        reason = f": {model.reason}" if model and model.reason else ""
        raise _not_ready(f"the model {name!r} is not ready after {self._wait_s:g} s{reason}")

    async def _until(self, check: Callable[[], T]) -> T | None:
        """Return the first true result of `check`, made again after each change; None after `wait_s` seconds."""
        try:
            async with asyncio.timeout(self._wait_s), self._changed:
                return await self._changed.wait_for(check)
        except TimeoutError:
            return None

    def _endpoint(self, name: str) -> Endpoint | None:
        """Return the endpoint of a model; None while there is none. Raises a 503 for a failed model."""
        model = self._model(name)
        if model is None:
            raise _not_ready(f"the model {name!r} was removed")
        if model.state == "failed":
            raise _not_ready(f"the model {name!r} cannot be served: {model.reason}")
        if model.state != "ready" or model.application not in self._running:
            return None
        endpoint = self._running[model.application].clients.endpoint
        endpoint.calls.touch()
        return endpoint

    # Following the directory.

    async def refresh(self) -> None:
        """Use the newest directory now. Raises `UnavailableError` if the manager does not answer."""
        assert self.link
        async with self._applying:
            await self._end_unused()
            # Report the old directory until no request uses the engines of a version that left.
            left = [version.left_at - 1 for version in self._running.values() if version.left_at is not None]
            revision = min([self.directory.revision, *left])
            directory = await self.link.follow(self._gateway, revision)
            if directory or not self.directory.ready.keys() <= self._running.keys():
                await self._apply(directory or self.directory)

    async def _follow(self) -> None:
        """Follow the directory until cancelled."""
        assert self.link
        while True:
            try:
                await self.refresh()
            except UnavailableError as error:
                log.debug("no news of models: %s", error)
            except Exception:
                log.exception("the directory of models could not be followed")
            await asyncio.sleep(FOLLOW_S)

    async def _apply(self, directory: Directory) -> None:
        """Make the endpoints of new versions, then use the directory, then end those of old versions."""
        versions = directory.ready
        for name in self._starting.keys() - versions.keys():
            self._starting[name].cancel()
        for name in versions.keys() - self._running.keys() - self._starting.keys():
            self._starting[name] = asyncio.create_task(self._start(versions[name]))
        if self._starting:
            await asyncio.wait(self._starting.values(), timeout=START_S)
        self._set_adapters(directory)
        last = self.directory.revision
        async with self._changed:
            self.directory = directory
            self._changed.notify_all()
        for application, running in self._running.items():
            if application in versions:
                running.left_at = None
            elif running.left_at is None:
                running.left_at = last + 1  # this gateway may have skipped revisions
                running.left_s = time.monotonic()

    async def _end_unused(self) -> None:
        """End the endpoints of versions that left once no request uses them, or may be about to."""
        for application, running in list(self._running.items()):
            unused = running.clients.endpoint.calls.idle_s() >= UNUSED_S
            if running.left_at is not None and (unused or time.monotonic() - running.left_s >= LEAVE_S):
                await self._running.pop(application).ends.aclose()

    async def _start(self, version: ServedModel) -> None:
        assert self._make
        ends = AsyncExitStack()
        try:
            clients = await self._make(version)
            await ends.enter_async_context(clients.endpoint.running())
            self._running[version.application] = _Running(clients, ends)
            self._set_adapters(self.directory)
        except MarsRayError as error:
            log.error("version %d of %r cannot be used here yet: %s", version.number, version.name, error)
        finally:
            del self._starting[version.application]
        async with self._changed:
            self._changed.notify_all()

    def _set_adapters(self, directory: Directory) -> None:
        self.main.adapters = directory.adapters.get(self.main.name)
        for application, model in directory.ready.items():
            if running := self._running.get(application):
                running.clients.endpoint.adapters = directory.adapters.get(model.name)


async def _facts(endpoint: Endpoint) -> ModelInfo | None:
    """Return the facts about a model; None if no engine has told them and none is up."""
    if endpoint.knows_model or not await endpoint.client.obstacle():
        with suppress(MarsRayError):
            return await endpoint.model_info()
    return None


def _not_ready(reason: str) -> ApiError:
    return ApiError.unavailable(f"{reason}. Try again later.", "model_not_ready", RETRY_AFTER_S, "model")

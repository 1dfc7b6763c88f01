"""Ray shell around `ModelManager`: the deployment that starts and ends the engines of an endpoint's further models.

Each version of a model is a Serve application of its own without a route, so that it can come and go without a change
to the application of the endpoint. Serve restarts this deployment if its process or node dies; meanwhile gateways use
the directory that they have.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from mars_ray.adapter.card import check_vocabulary, read_adapter_card, resolve_adapters
from mars_ray.errors import ConfigError, MarsRayError, ServeError
from mars_ray.model.resolve import resolve_model
from mars_ray.platform.accounts.account_store import open_audit_log
from mars_ray.platform.models.manager import ApplicationState, ModelManager, application_prefix
from mars_ray.platform.platform_config import AddedModel, PlatformConfig
from mars_ray.ray_private import delete_application, deploy_application, kv_get, kv_put
from mars_ray.serve.deploy.model_settings import ModelSettings
from mars_ray.serve.ray.adapters import put_adapters
from mars_ray.serve.ray.pinned import pinned_adapter, pinned_model
from mars_ray.storage.document import Content, Document, Version, VersionedDocument
from mars_ray.storage.location import locate

log = logging.getLogger(__name__)

STEP_S = 0.5
_STATUS: Mapping[ApplicationStatus, Any] = {
    ApplicationStatus.RUNNING: "running",
    ApplicationStatus.DEPLOYING: "deploying",
    ApplicationStatus.NOT_STARTED: "deploying",
    ApplicationStatus.UNHEALTHY: "running",
    ApplicationStatus.DEPLOY_FAILED: "failed",
    ApplicationStatus.DELETING: "deleting",
}


class Models:
    """The manager of models, as one replica that reserves no CPU."""

    async def __init__(self, config: PlatformConfig) -> None:  # type: ignore[misc]  # Serve awaits the constructor
        self._application = str(serve.get_replica_context().app_name)
        config = config.model_copy(update={"controller": config.controller or self._application})
        # One thread, because the manager is used by one thread at a time and waits for Serve and for the storage.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="models")
        _claim(str(config.controller), self._application)
        self._applications = RayApplications(str(config.controller))
        audit = open_audit_log(config.storage)
        self._manager = await self._in_thread(ModelManager, config, _document(config), self._applications, audit)
        self._stepping = asyncio.create_task(self._step_forever())

    async def call(self, method: str, *args: Any) -> Any:
        """Return the result of a method of `ModelsLink`, or its error, because Ray wraps exceptions in its own."""
        try:
            if method == ModelManager.change.__name__:
                by, action, subject, change, *arguments = args
                args = (by, action, subject, change, *await self._checked(change, *arguments))
            return await self._in_thread(getattr(self._manager, method), *args)
        except MarsRayError as error:
            return error

    async def _checked(self, change: str, *args: Any) -> tuple[Any, ...]:
        """Return the arguments of a change, with names that mean the same on every node.

        Raises the error of a model or an adapter that cannot be served.
        """
        # A model may have to be downloaded, so pin names in another thread.
        if change == "with_model":
            name, settings = args
            served: ModelSettings = await asyncio.to_thread(pinned_model, settings)
            args = (name, served)
        elif change == "with_adapter":
            model, name, folder, accounts = args
            folder = await asyncio.to_thread(pinned_adapter, folder)
            settings = await self._in_thread(self._manager.settings_of, model)
            served = settings.model_copy(update={"adapters": {name: folder}})
            args = (model, name, folder, accounts)
        else:
            return args
        # Check in a separate process, because the libraries for models take much memory.
        problem: MarsRayError | None = await ray.remote(num_cpus=0)(_problem).remote(served)
        if problem:
            raise problem
        return args

    async def _in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    async def _step_forever(self) -> None:
        while True:
            try:
                await self._in_thread(self._manager.step)
            except Exception:
                log.exception("the models could not be brought closer to what they should be")
            await asyncio.sleep(STEP_S)

    async def __del__(self) -> None:
        """End the models' engines if the endpoint is being deleted, but not if only this replica stops."""
        self._stepping.cancel()
        application = serve.status().applications.get(self._application)
        if application is None or application.status == ApplicationStatus.DELETING:
            self._applications.delete_all()


class RayApplications:
    """The Serve applications of the further models of the endpoint whose controller is called `controller`."""

    def __init__(self, controller: str) -> None:
        self._prefix = application_prefix(controller)

    def states(self) -> dict[str, ApplicationState]:
        """Return the state of each application by name."""
        states = {}
        for name, application in serve.status().applications.items():
            if name.startswith(self._prefix):
                messages = [deployment.message for deployment in application.deployments.values() if deployment.message]
                message = " ".join((messages or [application.message])[0].split())
                states[name] = ApplicationState(_STATUS[application.status], message)
        return states

    def deploy(self, name: str, config: PlatformConfig, settings: AddedModel) -> None:
        """Begin to deploy the engines of a model. Raises `MarsRayError`."""
        from mars_ray.platform.ray.app import added_engines

        try:
            deploy_application(added_engines(config, settings), name)
        except MarsRayError:
            raise
        except Exception as error:  # Serve and Ray refuse bad options with several kinds of errors
            lines = str(error).strip().splitlines() or [repr(error)]
            raise ServeError(f"its engines cannot be deployed: {lines[-1]}") from error

    def delete(self, name: str) -> None:
        """Begin to delete an application; its running requests may finish."""
        delete_application(name)

    def delete_all(self) -> None:
        """Begin to delete all applications."""
        for name in self.states():
            delete_application(name)

    def set_adapters(self, name: str, adapters: Mapping[str, str]) -> None:
        """Store the adapters of a model, which its engines follow. `name` is the controller of the model."""
        put_adapters(name, adapters)


class ClusterDocument:
    """A document in the cluster's key-value store, which lives as long as the cluster. It has one writer at a time."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.name = f"{key} in the cluster's store"

    def version(self) -> Version | None:
        """Return the number of changes."""
        return self.read().version

    def read(self) -> Content:
        """Return the content."""
        saved = kv_get(self._key)
        if not saved:
            return Content(None, b"")
        number, text = json.loads(saved)
        return Content((number,), text.encode())

    def swap(self, version: Version | None, data: bytes) -> bool:
        """Replace the content, if `version` is still the newest."""
        if self.version() != version:
            return False
        kv_put(self._key, json.dumps([(version or (0,))[0] + 1, data.decode()]))
        return True


def _claim(controller: str, application: str) -> None:
    """Keep the models, adapters and usage of other applications apart, which are stored under the controller's name.

    Raises `ConfigError` if another application has this controller.
    """
    for other, details in serve.status().applications.items():
        ending = details.status == ApplicationStatus.DELETING
        if other != application and not ending and (kv_get(_claim_key(other)) or b"").decode() == controller:
            raise ConfigError(
                f"controller is {controller!r}, which belongs to the application {other!r}. Choose another name: "
                "models, adapters, batches and usage of an endpoint are stored under it."
            )
    kv_put(_claim_key(application), controller)


def _claim_key(application: str) -> str:
    return f"controller-of:{application}"


def _document(config: PlatformConfig) -> Document:
    if config.storage is None:
        return ClusterDocument(f"models:{config.controller}")
    return VersionedDocument(locate(config.storage) / "accounts" / "models")


def _problem(settings: ModelSettings) -> MarsRayError | None:
    """Return why a model cannot be served with its adapters."""
    from mars_ray.engine.choose_engine import check_engine
    from mars_ray.model.folder import check_folder

    try:
        folder = resolve_model(settings.model)
        adapters = resolve_adapters(settings.adapter, settings.adapters)
        check_engine(check_folder(folder), settings.engine, adapters)
        for adapter in adapters.values():
            check_vocabulary(read_adapter_card(adapter), adapter, folder)
    except MarsRayError as error:
        return error
    return None

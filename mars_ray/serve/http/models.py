"""The models that a gateway serves, and the clients of their controllers."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.control.cluster_load import Backlog
from mars_ray.control.core.live_view import LiveReport, RunningJob
from mars_ray.control.core.status import ClusterStatus
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.serve.http.endpoint import Endpoint


class ControlClient(Protocol):
    """Client of the controller of a model, wherever it runs."""

    async def status(self) -> ClusterStatus:
        """Return the state and the decisions of the controller."""

    async def live(self, controller: str, after: int) -> LiveReport:
        """Return the cluster's state, and its history after frame `after` of the controller with id `controller`."""

    async def jobs(self) -> list[RunningJob]:
        """Return the batch jobs on the cluster."""

    async def update_backlog(self, backlog: Backlog, *, paused: bool) -> ClusterStatus:
        """Set the remaining work of batches (see `Controller.update_backlog`)."""

    async def set_threshold(self, threshold: float, name: str | None, seconds: float | None) -> None:
        """Override the policy for the class `name`, or for all classes if `name` is None. Raises `ConfigError`."""

    async def clear_threshold(self, name: str | None) -> None:
        """End the override for `name`, so that the policy decides again. Raises `ConfigError`."""


@dataclass(frozen=True, slots=True)
class ModelClients:
    """The endpoint of a model, and the client of its controller."""

    endpoint: Endpoint
    control: ControlClient


class GatewayModels(Protocol):
    """The models of one gateway, used within one event loop, inside `async with models.running()`."""

    @property
    def main(self) -> Endpoint:
        """The endpoint of the main model."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run the tokenizers and watch the engines of all models within the block. Raises `ModelError`."""

    async def find(self, name: str | None, owner: str) -> Endpoint:
        """Return the endpoint that answers a request of `owner` for a model or adapter; None means the main model.

        Raises a 404 for a model that does not exist for this owner, and a 503 if it is not ready in time.
        """

    async def infos(self, owner: str) -> list[ModelInfo]:
        """Return the facts about all models and adapters that `owner` may use."""

    def endpoints(self) -> list[Endpoint]:
        """Return the endpoints of all models."""

    def control(self, name: str | None) -> ControlClient:
        """Return the client of the controller of a model; None means the main model. Raises a 404."""

    def names(self) -> list[str]:
        """Return the names of the models whose controllers can be asked."""


class OneModel:
    """The only model of a gateway, with its adapters."""

    def __init__(self, clients: ModelClients) -> None:
        self.main = clients.endpoint
        self._control = clients.control

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run the tokenizer and watch the engines within the block. Raises `ModelError`."""
        return self.main.running()

    async def find(self, name: str | None, _owner: str) -> Endpoint:
        """Return the endpoint. Raises a 404 for an unknown model or adapter."""
        await self.main.check_model(name)
        return self.main

    async def infos(self, _owner: str) -> list[ModelInfo]:
        """Return the facts about the model and its adapters."""
        return (await self.main.model_info()).all_names()

    def endpoints(self) -> list[Endpoint]:
        """Return the endpoint."""
        return [self.main]

    def control(self, name: str | None) -> ControlClient:
        """Return the client of the controller. Raises a 404 for another model."""
        if name is None or name == self.main.name:
            return self._control
        raise not_running(name)

    def names(self) -> list[str]:
        """Return the name of the model."""
        return [self.main.name]


def not_running(name: str) -> ApiError:
    """Return the 404 error for a model without a controller."""
    message = f"the model {name[:NAME_CHARS]!r} does not run here."
    return ApiError(404, message, type="invalid_request_error", code="model_not_found")

"""Ray shell around `gateway_app` and `ChatCalls`: the gateways on Ray Serve, for HTTP and for calls by handle."""

import gc
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from openai.types.chat.chat_completion import ChatCompletion
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.errors import ConfigError
from mars_ray.model.resolve import resolve_model
from mars_ray.ray_private import serve_http_options
from mars_ray.serve.deploy import front
from mars_ray.serve.deploy.serve_config import ServeConfig, check_exposure
from mars_ray.serve.http.chat_calls import ChatCalls, Messages
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.extension import Meter
from mars_ray.serve.http.gateway_app import make_gateway_app
from mars_ray.serve.http.models import GatewayModels, ModelClients, OneModel
from mars_ray.serve.middleware.access import AccessMiddleware
from mars_ray.serve.ray.endpoint_controller import endpoint_controller
from mars_ray.serve.ray.ray_engine_client import RayEngineClient


class GatewayParts(NamedTuple):
    """The models and the app of a gateway."""

    models: GatewayModels
    app: AccessMiddleware


MakeGateway = Callable[..., GatewayParts]
"""A function such as `make_gateway`. Handles of further deployments follow the settings."""


def make_gateway(engines: DeploymentHandle, config: ServeConfig, *, name: str) -> GatewayParts:
    """Return the parts of the gateway `name`. `config` must name the controller."""
    models = OneModel(model_clients(engines, config))
    return GatewayParts(models, make_gateway_app(models, config, name=name))


def model_clients(engines: DeploymentHandle, config: ServeConfig, meter: Meter | None = None) -> ModelClients:
    """Return the endpoint of a model and the client of its controller. `config` must name the controller."""
    assert config.controller
    folder = resolve_model(config.model)
    endpoint = Endpoint(RayEngineClient(engines, config.model_wait_s), config, folder, meter)
    return ModelClients(endpoint, endpoint_controller(config, folder))


class ChatHandle:
    """Base class with the methods of the handle. Subclasses set `calls`, which answers the conversations.

    `make` makes the parts of a gateway. `others` are handles of further deployments, which run as long as the
    application does.
    """

    calls: ChatCalls

    def __init__(
        self, make: MakeGateway, engines: DeploymentHandle, config: ServeConfig, *others: DeploymentHandle
    ) -> None:
        self._make = make
        self._handles = (engines, *others)
        controller = config.controller or str(serve.get_replica_context().app_name)
        self._config = config.model_copy(update={"controller": controller})

    async def gateway_settings(self) -> tuple[MakeGateway, ServeConfig, Sequence[DeploymentHandle]]:
        """Return the arguments from which another process makes a gateway: the function, the settings, the handles."""
        return self._make, self._config, self._handles

    async def chat(self, messages: Messages, **fields: Any) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Yield the chunks of an answer: `handle.options(stream=True).chat.remote(messages, threshold=0.9)`.

        `fields` are those of a `/v1/chat/completions` body. Raises `RequestError` for a request that cannot be served.
        """
        async for chunk in self.calls.stream(messages, fields):
            yield chunk

    async def complete(self, messages: Messages, **fields: Any) -> ChatCompletion:
        """Return the whole answer: `await handle.complete.remote(messages, threshold=0.9)`. Fields are as in
        `chat`."""
        return await self.calls.collect(messages, fields)


class Chat(ChatHandle):
    """Deployment that `build_deployment` uses; it has no HTTP interface and checks no API keys."""

    async def __init__(  # type: ignore[misc]
        self, make: MakeGateway, engines: DeploymentHandle, config: ServeConfig, *others: DeploymentHandle
    ) -> None:
        super().__init__(make, engines, config, *others)
        endpoint = Endpoint(RayEngineClient(engines, config.model_wait_s), config, resolve_model(config.model))
        self._running = AsyncExitStack()
        await self._running.enter_async_context(endpoint.running())
        self.calls = ChatCalls(endpoint, config.classes[0].name)

    async def __del__(self) -> None:
        await self._running.aclose()


class Gateway(ChatHandle):
    """The HTTP gateway. The constructor raises `ConfigError` if `check_listening` does."""

    def __init__(
        self, make: MakeGateway, engines: DeploymentHandle, config: ServeConfig, *others: DeploymentHandle
    ) -> None:
        check_listening(config)
        super().__init__(make, engines, config, *others)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app. Serve calls this in the replica, so the app is never pickled."""
        name = serve.get_replica_context().replica_id.unique_id
        engines, *others = self._handles
        parts = self._make(engines, self._config, *others, name=name)
        self.calls = ChatCalls(parts.models.main, self._config.classes[0].name)
        # Exempt all objects that exist now from garbage collection: a scan takes 0.14 s, and all callers wait for it.
        gc.collect()
        gc.freeze()
        return without_request_id(parts.app)


def check_listening(config: ServeConfig) -> None:
    """Raise a `ConfigError` if other machines could use the endpoint without a key, or if HAProxy would not use the TLS
    certificate in its settings."""
    options = serve_http_options()
    check_exposure(os.environ.get(front.HOST) or options.host, config)
    if options.ssl_certfile and front.has_load_balancer():
        raise ConfigError(
            f"http_options.ssl_certfile has no effect on HAProxy, to which callers connect: set "
            f"{front.CERTIFICATE} and {front.KEY} on every node before `ray start`, and leave it out here."
        )


def without_request_id(gateway: ASGIApp) -> ASGIApp:
    """Return the app with x-request-id removed from its answers, because Serve adds this header to every answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await gateway(scope, receive, send_on)

    return app

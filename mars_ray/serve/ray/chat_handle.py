"""Ray shell around `ChatCalls`: the deployment whose handle other deployments use to call a model."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from openai.types.chat.chat_completion import ChatCompletion
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk
from ray import serve
from ray.serve.handle import DeploymentHandle

from mars_ray.model.resolve import resolve_model
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.serve.http.chat_calls import ChatCalls, Messages
from mars_ray.serve.http.gateway_app import make_endpoint
from mars_ray.serve.ray.gateway_parts import GatewayParts, make_gateway
from mars_ray.serve.ray.ray_engine_client import RayEngineClient

MakeGateway = Callable[..., GatewayParts]


class ChatHandle:
    """Base class with the methods of the handle. Subclasses set `calls`, which answers the conversations."""

    calls: ChatCalls
    make_gateway: ClassVar[MakeGateway] = staticmethod(make_gateway)
    """Makes the parts of a gateway."""

    def __init__(self, engines: DeploymentHandle, config: ServeConfig, *others: DeploymentHandle) -> None:
        self._engines = engines
        self._others = others
        self._config = config.model_copy(update={"controller": config.controller or _application()})

    async def gateway_settings(self) -> tuple[MakeGateway, ServeConfig, Sequence[DeploymentHandle]]:
        """Return the arguments from which another process makes a gateway: the function that makes it, the settings,
        and the handles of the engines and of the platform's deployments."""
        return self.make_gateway, self._config, (self._engines, *self._others)

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
    """Deployment that `build_deployment` uses; it has no HTTP interface and checks no API keys.

    `others` are deployments that a platform adds; they run as long as the application does.
    """

    async def __init__(  # type: ignore[misc]
        self, engines: DeploymentHandle, config: ServeConfig, *others: DeploymentHandle
    ) -> None:
        super().__init__(engines, config, *others)
        endpoint = make_endpoint(RayEngineClient(engines, config.model_wait_s), config, resolve_model(config.model))
        self._running = AsyncExitStack()
        await self._running.enter_async_context(endpoint.running())
        self.calls = ChatCalls(endpoint, config.classes[0].name)

    async def __del__(self) -> None:
        await self._running.aclose()


def _application() -> str:
    return str(serve.get_replica_context().app_name)

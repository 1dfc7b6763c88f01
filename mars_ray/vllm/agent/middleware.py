"""Run the agent in `vllm serve`: `--middleware mars_ray.vllm.agent.middleware.Agent`.

In:    the engine of the server, the key "controller" of our settings.
Out:   a heartbeat per second while the server runs.
Never: touches a request.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from uuid import uuid4

from mars_ray.errors import ConfigError
from mars_ray.vllm.agent.engine_agent import EngineAgent, log_end
from mars_ray.vllm.agent.reporter import Reporter
from mars_ray.vllm.agent.served_engine import ServerEngine
from mars_ray.vllm.settings import KEY, VllmSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Agent:
    """ASGI middleware that starts the agent with the server and ends it with the server."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on. A wrong configuration ends the start of the server."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        client: ServerEngine = scope["app"].state.engine_client
        try:
            settings = _settings_of(client)
        except ConfigError as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        running = asyncio.create_task(run_agent(client, settings))
        running.add_done_callback(log_end)
        try:
            await self._app(scope, receive, send)
        finally:
            running.cancel()


async def run_agent(client: ServerEngine, settings: VllmSettings) -> None:
    """Report to the controller and follow it until cancelled. Raises vLLM's error when the engine is gone."""
    controller = settings.controller
    assert controller is not None
    # Containers on one host may share the host's name and have equal process ids.
    replica = f"vllm-{socket.gethostname()}-{uuid4().hex[:8]}"
    agent = await EngineAgent.create(client, settings, controller, replica)
    reporter = Reporter(controller.name, controller.address, agent.plan)
    try:
        await agent.run(reporter.send)
    finally:
        await reporter.close()


def _settings_of(client: ServerEngine) -> VllmSettings:
    settings = VllmSettings.read(client.vllm_config.additional_config.get(KEY, {}))
    if settings.controller is None:
        raise ConfigError(
            f"additional_config {KEY}.controller is missing; the agent needs it, for example {{'name': 'chat'}}."
        )
    return settings

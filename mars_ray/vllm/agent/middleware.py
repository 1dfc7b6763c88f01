"""Run the agent in `vllm serve`: `--middleware mars_ray.vllm.agent.middleware.Agent`.

In:    the engine of the server, the key "controller" of our settings.
Out:   a heartbeat per second while the server runs.
Never: touches a request.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from mars_ray.adapter.card import AdapterCard, decoding_card
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.lease import Lease, run_heartbeats
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import ConfigError
from mars_ray.model.card import Card, accuracies, agreements
from mars_ray.model.folder import open_model
from mars_ray.vllm.agent.reporter import Reporter
from mars_ray.vllm.agent.served_engine import ServedEngine, ServerEngine
from mars_ray.vllm.agent.served_metrics import ServedMetrics
from mars_ray.vllm.engine.load import open_records
from mars_ray.vllm.settings import KEY, ControllerSettings, VllmSettings

log = logging.getLogger(__name__)

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
        running.add_done_callback(_log_end)
        try:
            await self._app(scope, receive, send)
        finally:
            running.cancel()


async def run_agent(client: ServerEngine, settings: VllmSettings) -> None:
    """Report to the controller and follow it until cancelled. Raises vLLM's error when the engine is gone."""
    controller = settings.controller
    assert controller is not None
    model = open_model(client.vllm_config.model_config.model)
    card = decoding_card(model.folder, None if settings.adapter is None else Path(settings.adapter))
    plan = _plan(client.vllm_config.model_config.model, card, settings, controller)
    records = await asyncio.to_thread(open_records, model, card, settings.block)
    engine = ServedEngine(
        client,
        records,
        lambda: ServedMetrics(REGISTRY.collect()),
        threshold=settings.threshold,
        block=settings.block,
    )
    lease = Lease(f"vllm-{socket.gethostname()}-{os.getpid()}", plan)
    reporter = Reporter(controller.name, controller.address, plan)
    try:
        await run_heartbeats(engine, lease, reporter.send)
    finally:
        await reporter.close()


def _settings_of(client: ServerEngine) -> VllmSettings:
    settings = VllmSettings.read(client.vllm_config.additional_config.get(KEY, {}))
    if settings.controller is None:
        raise ConfigError(
            f"additional_config {KEY}.controller is missing; the agent needs it, for example {{'name': 'chat'}}."
        )
    return settings


def _plan(
    model: str, card: Card | AdapterCard | None, settings: VllmSettings, controller: ControllerSettings
) -> ControlPlan:
    points = card.calibration if card else ()
    return ControlPlan(
        model=model,
        settings=controller.settings,
        ceiling=settings.threshold,
        classes=(ServiceClass(floor=controller.floor),),
        agreement=agreements(points),
        accuracy=accuracies(points),
    )


def _log_end(running: "asyncio.Task[None]") -> None:
    if not running.cancelled() and (error := running.exception()):
        log.error("the agent ended, and thresholds stay as they are: %s", error, exc_info=error)

"""The agent of one engine of vLLM: it reports to a controller and sets the thresholds that the controller wants."""

import asyncio
import logging
from pathlib import Path

from mars_ray.adapter.card import decoding_card
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.lease import Lease, Send, run_heartbeats
from mars_ray.engine.service_class import ServiceClass
from mars_ray.model.card import accuracies, agreements
from mars_ray.model.folder import open_model
from mars_ray.vllm.agent.served_engine import ServedEngine, ServerEngine
from mars_ray.vllm.engine.load import open_records
from mars_ray.vllm.engine_counts import COUNTS
from mars_ray.vllm.settings import ControllerSettings, VllmSettings

log = logging.getLogger(__name__)


class EngineAgent:
    """The engine behind `client`, the plan by which it is controlled, and its lease."""

    def __init__(self, engine: ServedEngine, plan: ControlPlan, lease: Lease) -> None:
        self._engine = engine
        self.plan = plan
        self.lease = lease

    @classmethod
    async def create(
        cls, client: ServerEngine, settings: VllmSettings, controller: ControllerSettings, replica: str
    ) -> "EngineAgent":
        """Return the agent of an engine that has started, under the name `replica`."""
        model = client.vllm_config.model_config.model
        resolved = open_model(model)
        card = decoding_card(resolved.folder, None if settings.adapter is None else Path(settings.adapter))
        points = card.calibration if card else ()
        plan = ControlPlan(
            model=model,
            settings=controller.settings,
            ceiling=settings.threshold,
            classes=(ServiceClass(floor=controller.floor),),
            agreement=agreements(points),
            accuracy=accuracies(points),
            lenient=settings.lenient,
        )
        records = await asyncio.to_thread(open_records, resolved, card, settings.block)
        counts = COUNTS[client.vllm_config.instance_id]
        engine = ServedEngine(client, records, counts, threshold=settings.threshold, block=settings.block)
        return cls(engine, plan, Lease(replica, plan))

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return self._engine.idle

    async def run(self, send: Send) -> None:
        """Send heartbeats until cancelled. Raises vLLM's error when the engine is gone."""
        await run_heartbeats(self._engine, self.lease, send)


def log_end(running: "asyncio.Task[None]") -> None:
    """Log the error with which an agent ended; the engine serves on."""
    if not running.cancelled() and (error := running.exception()):
        log.error("the agent ended, and thresholds stay as they are: %s", error, exc_info=error)

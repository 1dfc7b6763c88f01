"""MARS in Ray Serve LLM: `LLMConfig(server_cls="mars_ray.ray_llm:MarsLLMServer")`.

Each replica reports to the controller of its cluster and follows it, if `additional_config["mars"]["controller"]` names
one. Ray's router, autoscaler, dashboards and OpenAI-compatible app stay as they are. See docs/ray_llm.md.
"""

import asyncio

from ray import serve
from ray.serve.llm.deployment import LLMServer

from mars_ray.control.core.ray_controller import RayController
from mars_ray.serve.ray.autoscaling import autoscaling_stats
from mars_ray.vllm.agent.engine_agent import EngineAgent, log_end
from mars_ray.vllm.settings import KEY, VllmSettings

__all__ = ["MarsLLMServer"]


class MarsLLMServer(LLMServer):  # type: ignore[misc]  # Ray's package has no types here
    """A replica of Ray Serve LLM whose threshold a controller sets."""

    _agent: EngineAgent | None = None
    """None without a controller, and until the engine has started."""

    async def start(self) -> None:
        """Start the engine, and then the heartbeats."""
        await super().start()
        client = self.engine._engine_client  # Ray has no other way to an engine's configuration
        additional = client.vllm_config.additional_config.get(KEY)
        settings = VllmSettings.read(additional) if additional else None
        if settings is None or settings.controller is None:
            return
        replica = serve.get_replica_context().replica_id.unique_id
        self._agent = await EngineAgent.create(client, settings, settings.controller, replica)
        controller = RayController(settings.controller.name, self._agent.plan)
        self._heartbeats = asyncio.create_task(self._agent.run(controller.handle_report))
        self._heartbeats.add_done_callback(log_end)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the input of the autoscaling policy `by_capacity`. Serve calls this."""
        return autoscaling_stats(self._agent.lease, idle=self._agent.idle) if self._agent else {}

    async def __del__(self) -> None:
        if self._agent:
            self._heartbeats.cancel()
        await super().__del__()

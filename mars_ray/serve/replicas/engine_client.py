"""The gateway's interface to its engines, and an implementation for an engine in the same process.

In:    engine requests.
Out:   chunks; facts about the model; metrics.
Never: depends on HTTP.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.serve.replicas.engine_metrics import EngineMetrics
from mars_ray.serve.replicas.followed_adapters import FollowedAdapters
from mars_ray.serve.replicas.replica import Replica

Take = Callable[[Sequence[Chunk]], Awaitable[None]]
"""Takes the chunks of a request that have arrived. The next ones wait until it returns."""


class EngineClient(Protocol):
    """Client of the engines that serve one model. Every method may raise a `MarsRayError`."""

    async def watch(self) -> None:
        """Watch the engines until cancelled. Runs as long as the gateway does."""

    async def generate(self, request: Request, take: Take, *, whole: bool = False) -> None:
        """Give the chunks of a request to `take` as they arrive. Cancelling the task cancels the request.

        The chunks of a `whole` answer, which is not streamed, may arrive later and in larger parts, which costs less.
        """

    async def model_info(self) -> ModelInfo:
        """Return the facts about the model."""

    async def obstacle(self) -> str | None:
        """Return the reason why a request sent now would not be served; None if it would."""

    async def metrics(self) -> list[str]:
        """Return the metrics of each engine as OpenMetrics text."""


class LocalEngineClient:
    """Client of one engine, which it owns until `close`."""

    def __init__(self, engine: AsyncEngine, model: ModelInfo, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._replica = Replica(engine, model, metrics, FollowedAdapters(engine, lambda: None))

    async def watch(self) -> None:
        """Do nothing: this engine ends together with its client."""

    async def generate(self, request: Request, take: Take, *, whole: bool = False) -> None:
        """Give the chunks of a request to `take` as they arrive."""
        async with aclosing(self._replica.generate(request, whole)) as parts:
            async for part in parts:
                if isinstance(part, MarsRayError):
                    raise part
                await take(part)

    async def model_info(self) -> ModelInfo:
        """Return the facts about the model."""
        return await self._replica.model_info()

    async def obstacle(self) -> str | None:
        """Return the reason why the engine serves nothing now; None if it works."""
        return self._engine.obstacle

    async def metrics(self) -> list[str]:
        """Return the metrics of the engine."""
        return [await self._replica.metrics()]

    async def close(self) -> None:
        """Stop the engine; requests that are still running end with an error."""
        await self._engine.close()

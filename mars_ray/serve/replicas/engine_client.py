"""The HTTP gateway's interface to its engines, and an implementation for an engine in the same process.

In:    engine requests.
Out:   chunks; facts about the model; metrics.
Never: depends on HTTP.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.request import Request
from mars_ray.errors import ReplicaLostError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.serve.replicas.engine_metrics import EngineMetrics

PART_S = 0.25
"""Seconds between two parts of an answer that is not streamed, which limits the tokens that a caller who leaves is not
charged for."""


class EngineClient(Protocol):
    """Client of the engines that serve one model. Every method may raise a `MarsRayError`."""

    async def watch(self) -> None:
        """Watch the engines until cancelled. Runs as long as the gateway does."""

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request as they arrive; closing the generator cancels the request."""

    def collect(self, request: Request) -> AsyncGenerator[list[Chunk], None]:
        """Yield the chunks of a request in parts, at most about one per `PART_S`, which costs less than `stream`;
        closing the generator cancels the request."""

    async def model_info(self) -> ModelInfo:
        """Return the facts about the model."""

    async def ready(self) -> bool:
        """Return whether a request sent now would be served."""

    async def metrics(self) -> list[str]:
        """Return the metrics of each engine as Prometheus text."""


class LocalEngineClient:
    """Client of one engine, which it owns until `close`."""

    def __init__(self, engine: AsyncEngine, model: ModelInfo, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._model = model
        self._metrics = metrics

    async def watch(self) -> None:
        """Do nothing: this engine ends together with its client."""

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request as they arrive; closing the generator cancels the request."""
        observer = self._metrics.begin(request)
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                observer.observe(chunk)
                yield chunk

    async def collect(self, request: Request) -> AsyncGenerator[list[Chunk], None]:
        """Yield the chunks of a request in parts."""
        part: list[Chunk] = []
        sent_s = time.monotonic()
        async with aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                part.append(chunk)
                if time.monotonic() - sent_s >= PART_S:
                    yield part
                    part = []
                    sent_s = time.monotonic()
        yield part

    async def model_info(self) -> ModelInfo:
        """Return the facts about the model."""
        return self._model

    async def ready(self) -> bool:
        """Return whether the engine answers. If a step is running, waits until it ends."""
        try:
            await self._engine.state()
        except ReplicaLostError:
            return False
        return True

    async def metrics(self) -> list[str]:
        """Return the metrics of the engine."""
        return [self._metrics.text(await self._engine.state())]

    async def close(self) -> None:
        """Stop the engine; requests that are still running end with an error."""
        await self._engine.close()

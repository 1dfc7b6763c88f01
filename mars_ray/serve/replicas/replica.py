"""The core of a replica: one engine, called by gateways.

In:    engine requests.
Out:   chunks, and errors as values; facts about the model; metrics.
Never: depends on HTTP or Ray.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.serve.replicas.engine_metrics import EngineMetrics
from mars_ray.serve.replicas.followed_adapters import FollowedAdapters

PART_S = 0.25
"""Seconds between two parts of an answer that is not streamed, which limits the tokens that a caller who leaves is not
charged for."""


class Replica:
    """One engine with its adapters and metrics."""

    def __init__(
        self, engine: AsyncEngine, model: ModelInfo, metrics: EngineMetrics, adapters: FollowedAdapters
    ) -> None:
        self._engine = engine
        self._model = model
        self._metrics = metrics
        self._adapters = adapters
        self._looking_up: set[str] = set()
        """Ids of requests whose adapter is looked up, before the engine has them."""

    def has(self, request_id: str) -> bool:
        """Return whether a request is in work here."""
        return request_id in self._looking_up or self._engine.has(request_id)

    async def generate(self, request: Request, whole: bool = False) -> AsyncGenerator[list[Chunk] | MarsRayError, None]:
        """Yield the chunks of a request in parts, then the error if it failed; closing the generator cancels it.

        A part is one chunk; of a `whole` answer, which is not streamed, the chunks of `PART_S`, which costs less.
        Errors are values, because Ray's transports treat exceptions differently.
        """
        part: list[Chunk] = []
        sent_s = time.monotonic()
        observer = self._metrics.begin(request)
        try:
            if request.decode.adapter is not None:
                self._looking_up.add(request.id)
                try:
                    await self._adapters.look_up(request.decode.adapter)
                finally:
                    self._looking_up.discard(request.id)
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    observer.observe(chunk)
                    part.append(chunk)
                    if not whole or time.monotonic() - sent_s >= PART_S:
                        yield part
                        part = []
                        sent_s = time.monotonic()
            if part:
                yield part
        except MarsRayError as error:
            yield error

    async def model_info(self) -> ModelInfo:
        """Return the facts about the model, with the names of its adapters now."""
        return replace(self._model, adapters=tuple(self._engine.adapters))

    async def metrics(self) -> str:
        """Return the metrics of the engine as OpenMetrics text. Raises `ReplicaLostError`."""
        return self._metrics.text(await self._engine.state())

"""What the HTTP gateway needs of the engines behind it, be they in this process or on a cluster.

In:    engine requests.
Out:   chunks; what is known of the model; metrics.
Never: knows HTTP.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.openai_api.model_info import ModelInfo


class EngineClient(Protocol):
    """A client of the engines that serve one model. Every method may raise a `MarsRayError`."""

    async def watch(self) -> None:
        """Look after the engines until cancelled; runs as long as the gateway does."""

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request as they come; closing the generator cancels it."""

    async def collect(self, request: Request) -> list[Chunk]:
        """Return all chunks of a request once it ended; cancelling the task cancels it."""

    async def model_info(self) -> ModelInfo:
        """Return what is known of the model."""

    async def ready(self) -> bool:
        """Return whether a request sent now would be served."""

    async def metrics(self) -> list[str]:
        """Return the metrics of each engine as Prometheus text."""

"""The engines of a cluster as an `EngineClient` (shell): calls go through Serve's router to one of the replicas."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError, QueueFullError, ReplicaLostError, UnavailableError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.ray_private import fresh_request_id

WATCH_SECONDS = 1.0
OUTAGE_SECONDS = 30.0
"""Seconds without any engine after which waiting calls end: Serve itself would hold them for ever. A replica that died
is back sooner than this."""

LOST = "the replica that answered died. Send the request again."
NONE_UP = "no engine is up. Try again later."

T = TypeVar("T")


class RayEngineClient:
    """The engines of a cluster. Use it within one running event loop, and keep `watch` running there."""

    def __init__(self, engines: DeploymentHandle) -> None:
        # Plain pickle: what is sent are dataclasses, and Ray's default is made for functions.
        self._engines = engines.options(request_serialization="pickle", response_serialization="pickle")
        self._streams = self._engines.options(stream=True)
        self._up, self._up_s = False, time.monotonic()
        self._outage: asyncio.Future[None] | None = None
        """A future that is done once no engine was up for too long; calls that wait for an engine end with it."""

    async def watch(self) -> None:
        """Look after the engines until cancelled, so that no call waits for one that does not come."""
        while True:
            self._up = bool(await self._of_all("alive"))
            if self._up:
                self._up_s = time.monotonic()
            elif time.monotonic() - self._up_s > OUTAGE_SECONDS:
                self._end_waiting()
            await asyncio.sleep(WATCH_SECONDS)

    async def ready(self) -> bool:
        """Return whether a replica answered when they were last asked, `WATCH_SECONDS` ago or so.

        Callers need no key to ask for this, so it must cost nothing.
        """
        return self._up

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request as they come; closing the generator cancels it."""
        with fresh_request_id():
            chunks = self._streams.stream.remote(request)
        try:
            said = await self._unless_none_is_up(anext(chunks, None))
            while said is not None:
                yield _value(said)
                said = await _sent(anext(chunks, None))
        finally:
            chunks.cancel()

    async def collect(self, request: Request) -> list[Chunk]:
        """Return all chunks of a request once it ended; cancelling the task cancels it."""
        with fresh_request_id():
            response = self._engines.collect.remote(request)
        try:
            collected: list[Chunk] = _value(await self._unless_none_is_up(_awaited(response)))
        except BaseException:
            response.cancel()
            raise
        return collected

    async def model_info(self) -> ModelInfo:
        """Return what is known of the model."""
        with fresh_request_id():
            response = self._engines.model_info.remote()
        try:
            model: ModelInfo = await self._unless_none_is_up(_awaited(response))
        except BaseException:
            response.cancel()
            raise
        return model

    async def metrics(self) -> list[str]:
        """Return the metrics of each replica that answers."""
        return await self._of_all("metrics")

    async def _of_all(self, method: str) -> list[Any]:
        try:
            async with asyncio.timeout(WATCH_SECONDS):
                results = await self._engines.broadcast(method).results_async(return_exceptions=True)
        except (TimeoutError, RayActorError, DeploymentUnavailableError):
            return []
        return [each for each in results if not isinstance(each, BaseException)]

    async def _unless_none_is_up(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of `call`. Raises `UnavailableError` when no engine comes up while it waits."""
        if self._outage is None or self._outage.done():
            self._outage = asyncio.get_running_loop().create_future()
        calling = asyncio.ensure_future(_sent(call))
        try:
            await asyncio.wait((calling, self._outage), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise UnavailableError(NONE_UP)
            return calling.result()
        finally:
            calling.cancel()

    def _end_waiting(self) -> None:
        if self._outage is not None and not self._outage.done():
            self._outage.set_result(None)


def _value(said: Any) -> Any:
    """Return what a replica said. Raises what it gave as an error (see `EngineReplica`)."""
    if isinstance(said, MarsRayError):
        raise said
    return said


async def _awaited(response: Any) -> Any:
    return await response


async def _sent(call: Coroutine[Any, Any, T]) -> T:
    """Return the result of a call; errors of Ray become ours."""
    try:
        return await call
    except RayActorError as error:
        raise ReplicaLostError(LOST) from error
    except BackPressureError as error:
        raise QueueFullError("all engines have as many requests as they take. Try again later.") from error
    except DeploymentUnavailableError as error:
        raise UnavailableError(NONE_UP) from error

"""The engines of a cluster as an `EngineClient` (shell): calls go through Serve's router to one of the replicas."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar
from uuid import uuid4

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError, QueueFullError, ReplicaLostError, UnavailableError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.ray_private import broadcast, fresh_request_id
from mars_ray.serve.replicas.liveness import HEARD, LOST, WaitingCalls

WATCH_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""Seconds within which an engine must answer."""
UP_SECONDS = 2.5
OUTAGE_SECONDS = 30.0
"""Seconds without any engine after which waiting calls end: Serve itself would hold them for ever. A replica that died
is back sooner than this."""

NONE_UP = "no engine is up. Try again later."

T = TypeVar("T")


class RayEngineClient:
    """The engines of a cluster. Use it within one running event loop, and keep `watch` running there."""

    def __init__(self, engines: DeploymentHandle) -> None:
        # Plain pickle: what is sent are dataclasses, and Ray's default is made for functions.
        self._engines = engines.options(request_serialization="pickle", response_serialization="pickle")
        self._streams = self._engines.options(stream=True)
        self._up_s = time.monotonic()
        """Time of the last answer of an engine, or of the start of this client."""
        self._heard = False
        self._calls = WaitingCalls()

    async def watch(self) -> None:
        """Watch the engines until cancelled, so that no call waits for an engine that never answers."""
        asking = set[asyncio.Task[None]]()
        try:
            while True:
                # An engine that is slow to answer is heard all the same, and holds up no question to the others.
                asked = asyncio.create_task(self._ask(self._calls.unheard(up=self._up)))
                asking.add(asked)
                asked.add_done_callback(asking.discard)
                if time.monotonic() - self._up_s > OUTAGE_SECONDS:
                    self._calls.end(UnavailableError(NONE_UP))
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def ready(self) -> bool:
        """Return whether a replica answered within the last `UP_SECONDS`.

        Callers need no key to ask for this, so it must cost nothing.
        """
        return self._up

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request as they come; closing the generator cancels it."""
        with fresh_request_id():
            chunks = self._streams.stream.remote(request)
        with self._calls.call(request.id) as call:
            try:
                while (said := await call.wait_for(_sent(anext(chunks, None)))) is not None:
                    yield _value(said)
            finally:
                chunks.cancel()

    async def collect(self, request: Request) -> list[Chunk]:
        """Return all chunks of a request once it ended; cancelling the task cancels it."""
        with fresh_request_id():
            response = self._engines.collect.remote(request)
        collected: list[Chunk] = _value(await self._answer(request.id, response))
        return collected

    async def model_info(self) -> ModelInfo:
        """Return the facts about the model."""
        with fresh_request_id():
            response = self._engines.model_info.remote()
        model: ModelInfo = await self._answer(uuid4().hex, response)
        return model

    async def metrics(self) -> list[str]:
        """Return the metrics of each replica that answers."""
        return [said async for said in broadcast(self._engines, "metrics", within_s=WATCH_SECONDS)]

    @property
    def _up(self) -> bool:
        return self._heard and time.monotonic() - self._up_s < UP_SECONDS

    async def _ask(self, calls: list[str]) -> None:
        async for replica, running in broadcast(self._engines, "running", calls, within_s=ANSWER_SECONDS):
            HEARD.note(replica)
            self._calls.hear(running)
            self._heard, self._up_s = True, time.monotonic()

    async def _answer(self, name: str, response: Any) -> Any:
        with self._calls.call(name) as call:
            try:
                return await call.wait_for(_sent(_awaited(response)))
            except BaseException:
                response.cancel()
                raise


def _value(said: Any) -> Any:
    """Return the value of a replica; raise it if it is an error (see `EngineReplica`)."""
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

"""Ray shell: an `EngineClient` for a cluster's engines. Calls go through Serve's router to one of the replicas."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar
from uuid import uuid4

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError, QueueFullError, ReplicaLostError, UnavailableError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.ray_private import broadcast, fresh_request_id, is_sent
from mars_ray.serve.http.streams import cancel_tasks
from mars_ray.serve.replicas.engine_client import Take
from mars_ray.serve.replicas.liveness import HEARD, LOST, NONE_UP, STOPPING, WaitingCalls

WATCH_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""Seconds within which an engine must answer."""
UP_SECONDS = 2.5

T = TypeVar("T")


class RayEngineClient:
    """Client of the engines of a cluster. Use it within one running event loop, and keep `watch` running there.

    While no engine is up, a call waits up to `wait_s` seconds, unless the engines are being deleted; Serve itself would
    hold it for ever.
    """

    def __init__(self, engines: DeploymentHandle, wait_s: float) -> None:
        # Plain pickle is enough for the dataclasses sent here; Ray's default serializer is built for functions.
        self._engines = engines.options(request_serialization="pickle", response_serialization="pickle")
        self._streams = self._engines.options(stream=True)
        self._answers: dict[str, tuple[float, str | None]] = {}
        """Time of the last answer of each replica, and its obstacle then."""
        self._calls = WaitingCalls(wait_s / WATCH_SECONDS)

    async def watch(self) -> None:
        """Watch the engines until cancelled, so that no call waits for an engine that never answers."""
        tasks = set[asyncio.Task[None]]()
        try:
            while True:
                # Each round is a task of its own, so that a slow answer still counts but does not delay the next.
                task = asyncio.create_task(self._ask(self._calls.unheard(up=self._up)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            await cancel_tasks(*tasks)

    async def obstacle(self) -> str | None:
        """Return None if a replica whose engine works answered within the last `UP_SECONDS`, and else the reason.

        Callers without a key can trigger this, so it must be almost free.
        """
        obstacles = self._obstacles()
        return None if None in obstacles else next(iter(obstacles), NONE_UP)

    async def generate(self, request: Request, take: Take, *, whole: bool = False) -> None:
        """Give the chunks of a request to `take` as they arrive. Cancelling the task cancels the request."""
        with fresh_request_id():
            parts = self._streams.generate.remote(request, whole)
        with self._calls.call(request.id, lambda: is_sent(parts)) as call:
            try:
                while (part := await call.wait_for(_sent(anext(parts, None)))) is not None:
                    if isinstance(part, MarsRayError):
                        raise part
                    await take(part)
            finally:
                parts.cancel()

    async def model_info(self) -> ModelInfo:
        """Return the facts about the model."""
        with fresh_request_id():
            response = self._engines.model_info.remote()
        with self._calls.call(uuid4().hex, lambda: is_sent(response)) as call:
            try:
                model: ModelInfo = await call.wait_for(_sent(response))
            except BaseException:
                response.cancel()
                raise
        return model

    async def metrics(self) -> list[str]:
        """Return the metrics of each replica that answers."""
        return [text async for text in broadcast(self._engines, "metrics", within_s=WATCH_SECONDS)]

    @property
    def _up(self) -> bool:
        return bool(self._obstacles())

    def _obstacles(self) -> list[str | None]:
        """Return the obstacle, or None, of each replica that answered within the last `UP_SECONDS`."""
        now_s = time.monotonic()
        self._answers = {name: answer for name, answer in self._answers.items() if now_s - answer[0] < UP_SECONDS}
        return [obstacle for _, obstacle in self._answers.values()]

    async def _ask(self, calls: list[str]) -> None:
        async for replica, running, obstacle in broadcast(self._engines, "running", calls, within_s=ANSWER_SECONDS):
            if obstacle is None:  # the router avoids the others
                HEARD.note(replica)
            self._calls.hear(running)
            self._answers[replica] = time.monotonic(), obstacle
        if self._calls.unsent and not self._up and await asyncio.to_thread(self._are_deleted):
            for call in self._calls.unsent:
                call.end(UnavailableError(STOPPING))

    def _are_deleted(self) -> bool:
        """Return whether the application of the engines is being deleted."""
        application = serve.status().applications.get(self._engines.app_name)
        return application is not None and application.status == "DELETING"


async def _sent(call: Awaitable[T]) -> T:
    """Return the result of a call. Raises Ray's errors as `MarsRayError`."""
    try:
        return await call
    except RayActorError as error:
        raise ReplicaLostError(LOST) from error
    except BackPressureError as error:
        raise QueueFullError("all engines have the maximum number of requests. Try again later.") from error
    except DeploymentUnavailableError as error:
        raise UnavailableError(NONE_UP) from error

"""Ray shell: a model's endpoint inside the FastAPI application of another deployment, under any prefix."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mars_ray.errors import MarsRayError, UnavailableError
from mars_ray.openai_api.api_error import api_error
from mars_ray.serve.ray.gateway import check_listening, without_request_id

log = logging.getLogger(__name__)

NOT_THERE = "the model is not available yet. Try again later."


class MountedApp:
    """ASGI app for `app.mount("/llm", MountedApp(get_handle))`, where `app` is the FastAPI application of a deployment.

    `get_handle` returns a handle to an application from `build_deployment` or `build_openai_app`. It is called at the
    first request, because this object is created and pickled long before anything runs. From then on, a gateway in
    this process answers the requests, with the routes, keys and limits of `build_openai_app`.
    """

    def __init__(self, get_handle: Callable[[], DeploymentHandle]) -> None:
        self._get_handle = get_handle
        self._starting: asyncio.Task[ASGIApp] | None = None
        self._running = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope. Until the model is available, the answer is a 503."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._started())
        try:
            app = await asyncio.shield(self._starting)
        except Exception as error:  # also of `get_handle`; the next request tries again
            log.exception("the gateway to the model could not be started")
            self._starting = None
            refusal = api_error(error if isinstance(error, MarsRayError) else UnavailableError(NOT_THERE))
            app = JSONResponse(refusal.body(), refusal.status, refusal.headers)
        await app(scope, receive, send)

    async def _started(self) -> ASGIApp:
        handle = await asyncio.to_thread(self._get_handle)
        make_gateway, config, handles = await handle.gateway_settings.remote()
        check_listening(config)
        name = serve.get_replica_context().replica_id.unique_id
        parts = make_gateway(handles[0], config, *handles[1:], name=f"{name}:{config.model_name}")
        await self._running.enter_async_context(parts.app.running())
        return without_request_id(parts.app)

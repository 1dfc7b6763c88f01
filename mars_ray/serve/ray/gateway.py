"""The HTTP gateway on Ray Serve (shell around `gateway_app`); the load balancer sends requests to its replicas."""

import gc

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.control.core.ray_controller import RayController
from mars_ray.model.resolve import resolve_model
from mars_ray.ray_private import serve_http_host
from mars_ray.serve.deploy.config import ServeConfig, check_exposure
from mars_ray.serve.http.chat_calls import ChatCalls
from mars_ray.serve.http.gateway_app import make_endpoint, make_gateway_app
from mars_ray.serve.ray.chat import ChatHandle
from mars_ray.serve.ray.engine_client import RayEngineClient


class Gateway(ChatHandle):
    """Raises `ConfigError` when it would let strangers in: no keys, and Serve listens beyond this machine."""

    def __init__(self, engines: DeploymentHandle, config: ServeConfig) -> None:
        check_exposure(serve_http_host(), config)
        self._engines, self._config = engines, config

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app; Serve calls this in the replica, so nothing of it is pickled."""
        name = serve.get_replica_context().replica_id.unique_id
        folder = resolve_model(self._config.model)
        control = RayController(
            self._config.controller or serve.get_replica_context().app_name, self._config.plan(folder)
        )
        endpoint = make_endpoint(RayEngineClient(self._engines), self._config, folder)
        self.calls = ChatCalls(endpoint, self._config.classes[0].name)
        gateway = make_gateway_app(endpoint, control, self._config, name=name)

        # Serve puts x-request-id on every answer, and a client would see both.
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_on(message: Message) -> None:
                if message["type"] == "http.response.start":
                    kept = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                    message = {**message, "headers": kept}
                await send(message)

            await gateway(scope, receive, send_on)

        # What is there by now, stays: to look through all of it for garbage takes 0.14 s, in which all callers wait.
        gc.collect()
        gc.freeze()
        return app

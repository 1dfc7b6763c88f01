"""The HTTP gateway on Ray Serve (shell around `gateway_app`); the load balancer sends requests to its replicas."""

import gc

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.control.core.ray_controller import RayController
from mars_ray.model.resolve import resolve_model
from mars_ray.serve.deploy.config import ServeConfig
from mars_ray.serve.http.bounded_heads import bound_heads
from mars_ray.serve.http.chat_calls import ChatCalls
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.gateway_app import make_endpoint, make_gateway_app
from mars_ray.serve.ray.chat import ChatHandle
from mars_ray.serve.ray.engine_client import RayEngineClient
from mars_ray.serve.ray.listening import check_listening


class Gateway(ChatHandle):
    """Raises `ConfigError` when it would let strangers in, or show keys that TLS should hide."""

    def __init__(self, engines: DeploymentHandle, config: ServeConfig) -> None:
        check_listening(config)
        super().__init__(engines, config)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app; Serve calls this in the replica, so nothing of it is pickled."""
        bound_heads(2 * self._config.limits.header_bytes)  # what is a little too large gets an error that says so
        name = serve.get_replica_context().replica_id.unique_id
        endpoint, app = make_ray_gateway(self._engines, self._config, name=name)
        self.calls = ChatCalls(endpoint, self._config.classes[0].name)
        # What is there by now, stays: to look through all of it for garbage takes 0.14 s, in which all callers wait.
        gc.collect()
        gc.freeze()
        return without_request_id(app)


def make_ray_gateway(engines: DeploymentHandle, config: ServeConfig, *, name: str) -> tuple[Endpoint, ASGIApp]:
    """Return the gateway to the engines, and what answers within it; `config` names the controller."""
    assert config.controller
    folder = resolve_model(config.model)
    endpoint = make_endpoint(RayEngineClient(engines), config, folder)
    control = RayController(config.controller, config.plan(folder))
    return endpoint, make_gateway_app(endpoint, control, config, name=name)


def without_request_id(gateway: ASGIApp) -> ASGIApp:
    """Return the app without x-request-id, which Serve puts on every answer: a client would see two."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await gateway(scope, receive, send_on)

    return app

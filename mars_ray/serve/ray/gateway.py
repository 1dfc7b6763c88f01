"""Ray shell around `gateway_app`: the HTTP gateway on Ray Serve. The load balancer sends requests to its replicas."""

import gc
import os

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.errors import ConfigError
from mars_ray.ray_private import serve_http_options
from mars_ray.serve.deploy import front
from mars_ray.serve.deploy.front import has_load_balancer
from mars_ray.serve.deploy.serve_config import ServeConfig, check_exposure
from mars_ray.serve.http.chat_calls import ChatCalls
from mars_ray.serve.ray.chat_handle import ChatHandle


def check_listening(config: ServeConfig) -> None:
    """Raise a `ConfigError` if other machines could use the endpoint without a key, or if HAProxy would not use the TLS
    certificate in its settings."""
    options = serve_http_options()
    check_exposure(os.environ.get(front.HOST) or options.host, config)
    if options.ssl_certfile and has_load_balancer():
        raise ConfigError(
            f"http_options.ssl_certfile has no effect on HAProxy, to which callers connect: set "
            f"{front.CERTIFICATE} and {front.KEY} on every node before `ray start`, and leave it out here."
        )


class Gateway(ChatHandle):
    """The HTTP gateway. The constructor raises `ConfigError` if `check_listening` does.

    `others` are deployments that a platform adds; they run as long as the application does.
    """

    def __init__(self, engines: DeploymentHandle, config: ServeConfig, *others: DeploymentHandle) -> None:
        check_listening(config)
        super().__init__(engines, config, *others)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app. Serve calls this in the replica, so the app is never pickled."""
        name = serve.get_replica_context().replica_id.unique_id
        parts = self.make_gateway(self._engines, self._config, *self._others, name=name)
        self.calls = ChatCalls(parts.models.main, self._config.classes[0].name)
        # Exempt all objects that exist now from garbage collection: a scan takes 0.14 s, and all callers wait for it.
        gc.collect()
        gc.freeze()
        return without_request_id(parts.app)


def without_request_id(gateway: ASGIApp) -> ASGIApp:
    """Return the app with x-request-id removed from its answers, because Serve adds this header to every answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await gateway(scope, receive, send_on)

    return app

"""Ray shell around `gateway_app`: the HTTP gateway on Ray Serve. The load balancer sends requests to its replicas."""

import asyncio
import gc
import os

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.control.core.ray_controller import RayController
from mars_ray.errors import ConfigError
from mars_ray.model.resolve import resolve_model
from mars_ray.ray_private import serve_http_options
from mars_ray.serve.deploy import front
from mars_ray.serve.deploy.front import has_load_balancer
from mars_ray.serve.deploy.serve_config import ServeConfig, check_exposure
from mars_ray.serve.http.bounded_heads import bound_heads
from mars_ray.serve.http.chat_calls import ChatCalls
from mars_ray.serve.http.gateway_app import make_endpoint, make_gateway_app
from mars_ray.platform.models.served_models import ModelClients, ServedModels
from mars_ray.serve.middleware.key_store import audit_folder
from mars_ray.platform.models.directory import ServedVersion
from mars_ray.serve.ray.chat_handle import ChatHandle
from mars_ray.serve.ray.ray_engine_client import RayEngineClient
from mars_ray.platform.ray.ray_meter import RayMeter
from mars_ray.platform.ray.ray_models import RayModels
from mars_ray.platform.ray.ray_response_store import RayResponseStore
from mars_ray.platform.usage.gateway_meter import GatewayMeter


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

    `_batches`, the runner of batches, runs as long as the application does. Gateways reach it through the storage.
    """

    def __init__(
        self, engines: DeploymentHandle, config: ServeConfig, models: DeploymentHandle, *_batches: DeploymentHandle
    ) -> None:
        check_listening(config)
        super().__init__(engines, config, models)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app. Serve calls this in the replica, so the app is never pickled."""
        # Twice the limit, so that heads slightly above the limit still get an explicit error from the app.
        bound_heads(2 * self._config.limits.header_bytes)
        name = serve.get_replica_context().replica_id.unique_id
        models, app = make_ray_gateway(self._engines, self._config, self._models, name=name)
        self.calls = ChatCalls(models.main, self._config.classes[0].name)
        # Exempt all objects that exist now from garbage collection: a scan takes 0.14 s, and all callers wait for it.
        gc.collect()
        gc.freeze()
        return without_request_id(app)


def make_ray_gateway(
    engines: DeploymentHandle, config: ServeConfig, models: DeploymentHandle, *, name: str
) -> tuple[ServedModels, ASGIApp]:
    """Return the models of a gateway and its app. `config` must name the controller."""
    served = ray_models(engines, config, models, name=name)
    assert config.controller
    return served, make_gateway_app(served, RayResponseStore(config.controller), config, name=name)


def ray_models(engines: DeploymentHandle, config: ServeConfig, models: DeploymentHandle, *, name: str) -> ServedModels:
    """Return the models of a gateway or of the runner of batches. `config` must name the controller."""
    assert config.controller
    meter = None
    if config.meters_usage:
        meter = GatewayMeter(RayMeter(config.controller, config.storage), config.prices, name=name)

    def clients(engines: DeploymentHandle, config: ServeConfig) -> ModelClients:
        folder = resolve_model(config.model)
        endpoint = make_endpoint(RayEngineClient(engines), config, folder, meter)
        control = RayController(str(config.controller), config.plan(folder), audit_folder(config.storage))
        return ModelClients(endpoint, control)

    async def make(version: ServedVersion) -> ModelClients:
        # In a thread, because the model's folder may have to be fetched. The handle needs the event loop.
        await asyncio.to_thread(resolve_model, version.config.model)
        return clients(serve.get_deployment_handle("Engine", version.application), version.config)

    link = RayModels(models)
    return ServedModels(clients(engines, config), link, make, gateway=name, wait_s=config.model_wait_s)


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

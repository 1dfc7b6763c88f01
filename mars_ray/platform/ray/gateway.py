"""Ray shell: the HTTP gateway with a platform around the core."""

import asyncio
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from mars_ray.model.resolve import resolve_model
from mars_ray.platform.gateway import Platform
from mars_ray.platform.models.registry import ServedModel
from mars_ray.platform.models.served_models import ModelsLink, ServedModels
from mars_ray.platform.platform_config import PlatformConfig
from mars_ray.platform.ray.actors import RayMeter, RayResponseStore
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.ray_actor import RemoteClient, remote
from mars_ray.ray_private import fresh_request_id
from mars_ray.serve.http.gateway_app import make_gateway_app
from mars_ray.serve.http.models import ModelClients
from mars_ray.serve.ray.gateway import GatewayParts, model_clients

CHANGE_S = 600.0
"""Maximum seconds for a change, which may download a model."""


class RayModels(RemoteClient):
    """A `ModelsLink` over a handle to the deployment."""

    WITHIN_S = 5.0
    SILENT = "the manager of models does not answer."
    UNREACHABLE = (*RemoteClient.UNREACHABLE, RayServeException)

    follow = remote(ModelsLink.follow)
    change = remote(ModelsLink.change, within_s=CHANGE_S)

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def send(self, method: str, *args: Any, **settings: Any) -> Any:
        """Return the answer of the deployment."""
        with fresh_request_id():
            response = self._handle.call.remote(method, *args, **settings)
        return await response


def make_gateway(
    engines: DeploymentHandle, config: PlatformConfig, models: DeploymentHandle, *_batches: DeploymentHandle, name: str
) -> GatewayParts:
    """Return the parts of a gateway. `config` must name the controller."""
    assert config.controller
    meter = make_meter(config, name)
    served = make_models(engines, config, models, meter, name=name)
    platform = Platform(config, served, meter, RayResponseStore(config.controller), name=name)
    return GatewayParts(served, make_gateway_app(served, config, name=name, extension=platform))


def make_meter(config: PlatformConfig, name: str) -> GatewayMeter | None:
    """Return the meter of a gateway or of the runner of batches; None if the endpoint counts no usage."""
    assert config.controller
    if not config.meters_usage:
        return None
    return GatewayMeter(RayMeter(config.controller, config.storage), config.prices, name=name)


def make_models(
    engines: DeploymentHandle,
    config: PlatformConfig,
    models: DeploymentHandle,
    meter: GatewayMeter | None,
    *,
    name: str,
) -> ServedModels:
    """Return the models of a gateway or of the runner of batches. `config` must name the controller."""

    async def make(model: ServedModel) -> ModelClients:
        # In a thread, because the model's folder may have to be fetched. The handle needs the event loop.
        await asyncio.to_thread(resolve_model, model.config.model)
        return model_clients(serve.get_deployment_handle("Engine", model.application), model.config, meter)

    main = model_clients(engines, config, meter)
    return ServedModels(
        main,
        RayModels(models),
        make,
        gateway=name,
        wait_s=config.model_wait_s,
        access=config.access,
        adapters=config.adapters,
    )

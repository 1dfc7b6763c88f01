"""Ray shell: the HTTP gateway with a platform around the core."""

import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle

from mars_ray.model.resolve import resolve_model
from mars_ray.platform.gateway import Platform
from mars_ray.platform.models.directory import ServedVersion
from mars_ray.platform.models.served_models import ServedModels
from mars_ray.platform.platform_config import PlatformConfig
from mars_ray.platform.ray.ray_meter import RayMeter
from mars_ray.platform.ray.ray_models import RayModels
from mars_ray.platform.ray.ray_response_store import RayResponseStore
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.serve.http.gateway_app import make_gateway_app
from mars_ray.serve.http.models import ModelClients
from mars_ray.serve.ray.gateway import GatewayParts, model_clients


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

    async def make(version: ServedVersion) -> ModelClients:
        # In a thread, because the model's folder may have to be fetched. The handle needs the event loop.
        await asyncio.to_thread(resolve_model, version.config.model)
        return model_clients(serve.get_deployment_handle("Engine", version.application), version.config, meter)

    main = model_clients(engines, config, meter)
    return ServedModels(main, RayModels(models), make, gateway=name, wait_s=config.model_wait_s, access=config.access)

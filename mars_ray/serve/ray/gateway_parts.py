"""Ray shell: the models and the app of a gateway whose engines and controller are on this cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from mars_ray.control.core.ray_controller import RayController
from mars_ray.model.resolve import resolve_model
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.serve.http.extension import Extension
from mars_ray.serve.http.gateway_app import KeyFile, make_endpoint, make_gateway_app
from mars_ray.serve.http.meter import Meter
from mars_ray.serve.http.models import GatewayModels, ModelClients, OneModel
from mars_ray.serve.ray.ray_engine_client import RayEngineClient


class GatewayParts(NamedTuple):
    """The models, the extension and the app of a gateway."""

    models: GatewayModels
    extension: Extension
    app: ASGIApp

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the models and the extension within the block, for an app whose lifespan nobody runs."""
        async with self.extension.running(), self.models.running():
            yield


def make_gateway(engines: DeploymentHandle, config: ServeConfig, *, name: str) -> GatewayParts:
    """Return the parts of a gateway of the core alone. `config` must name the controller."""
    models = OneModel(model_clients(engines, config))
    extension = KeyFile(config)
    return GatewayParts(models, extension, make_gateway_app(models, config, name=name, extension=extension))


def model_clients(engines: DeploymentHandle, config: ServeConfig, meter: Meter | None = None) -> ModelClients:
    """Return the endpoint of a model and the client of its controller. `config` must name the controller."""
    assert config.controller
    folder = resolve_model(config.model)
    control = RayController(config.controller, config.plan(folder), config.audit_folder)
    return ModelClients(make_endpoint(RayEngineClient(engines, config.model_wait_s), config, folder, meter), control)

"""The client of an endpoint's controller."""

from pathlib import Path

from ray import serve

from mars_ray.control.core.ray_controller import RayController
from mars_ray.serve.deploy.serve_config import ServeConfig


def endpoint_controller(config: ServeConfig, folder: Path) -> RayController:
    """Return a client of the controller of an endpoint, from within one of its replicas. `folder` is its main model.

    Whichever client comes first starts the controller with its own arguments, so all clients are made here.
    """
    name = config.controller or str(serve.get_replica_context().app_name)
    return RayController(name, config.plan(folder), config.audit_folder)

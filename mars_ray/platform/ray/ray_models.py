"""Ray shell: the client with which a gateway calls the deployment `Models`."""

from typing import Any

from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from mars_ray.platform.models.served_models import ModelsLink
from mars_ray.ray_actor import RemoteClient, remote
from mars_ray.ray_private import fresh_request_id

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

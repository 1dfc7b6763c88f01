"""Ray shell: the way of a gateway to the deployment `Models`."""

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from mars_ray.errors import MarsRayError, UnavailableError
from mars_ray.platform.models.directory import Directory
from mars_ray.ray_private import fresh_request_id

ASK_S = 5.0
CHANGE_S = 600.0
"""Maximum seconds for a change, which may download a model."""


class RayModels:
    """A `ModelsLink` over a handle to the deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def follow(self, gateway: str, revision: int) -> Directory | None:
        """Return the directory, unless `revision` is its newest."""
        directory: Directory | None = await self._ask("follow", gateway, revision)
        return directory

    async def change(self, by: str, action: str, subject: str, method: str, *args: Any) -> None:
        """Change the registry by one of its methods."""
        await self._ask("change", by, action, subject, method, *args, within_s=CHANGE_S)

    async def _ask(self, method: str, *args: Any, within_s: float = ASK_S) -> Any:
        try:
            with fresh_request_id():
                response = getattr(self._handle, method).remote(*args)
            async with asyncio.timeout(within_s):
                answer = await response
        except (RayError, RayServeException, TimeoutError) as error:
            raise UnavailableError("the manager of models does not answer. Try again in a few seconds.") from error
        if isinstance(answer, MarsRayError):
            raise answer
        return answer

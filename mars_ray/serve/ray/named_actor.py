"""Ray shell: a named, detached actor that the processes of an application share, and that may end itself while idle."""

import asyncio
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import ActorDiedError, RayError

from mars_ray.errors import MarsRayError, UnavailableError
from mars_ray.ray_private import NAMESPACE

ASK_SECONDS = 10.0
"""Seconds that a call may take, which may include the start of the actor."""


class NamedActor:
    """Client of the actor `name`, whose class is `kind`. Use it within one event loop.

    The first call starts the actor with `arguments` and a unique name, which a restarted actor has again. Its methods
    return errors as values, because Ray wraps exceptions in its own. `title` names it in errors.
    """

    def __init__(self, kind: type, name: str, *arguments: object, title: str) -> None:
        self._kind: Any = ray.remote(kind)
        self._name = name
        self._arguments = arguments
        self._title = title
        self._handle: Any = None
        self._starting = asyncio.Lock()

    async def ask(self, method: str, *args: Any) -> Any:
        """Return the result of a method.

        Raises the `MarsRayError` of the method, and `UnavailableError` if the actor does not answer.
        """
        try:
            async with asyncio.timeout(ASK_SECONDS):
                try:
                    answer = await self._call(method, *args)
                except ActorDiedError:  # the actor ended itself because it was idle: start a new one
                    self._handle = None
                    answer = await self._call(method, *args)
        except (RayError, TimeoutError) as error:
            raise UnavailableError(f"{self._title} does not answer. Try again in a few seconds.") from error
        if isinstance(answer, MarsRayError):
            raise answer
        return answer

    async def _call(self, method: str, *args: Any) -> Any:
        async with self._starting:
            if self._handle is None:
                self._handle = await asyncio.to_thread(self._start)
        return await getattr(self._handle, method).remote(*args)

    def _start(self) -> Any:
        actor = self._kind.options(
            name=self._name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
        )
        return actor.remote(*self._arguments, uuid4().hex)


def remove_actor(name: str, method: str, *args: Any) -> None:
    """End the actor `name`, if there is one, after a last call."""
    try:
        handle = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return
    ray.wait([getattr(handle, method).remote(*args)], timeout=ASK_SECONDS)
    ray.kill(handle)

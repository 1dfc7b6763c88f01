"""Ray shell: named, detached actors that the processes of an application share, and typed clients of them.

In:    a class derived from `SharedActor`, and a client class that lists the methods to call with `remote`.
Out:   the result of a method, or its `MarsRayError`; `UnavailableError` if the actor does not answer in time.
Never: leaves an actor running that nobody has used for its idle time.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from inspect import isawaitable
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, overload

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util import list_named_actors

from mars_ray.errors import MarsRayError, UnavailableError
from mars_ray.ray_private import NAMESPACE

REMOVE_S = 10.0
"""Maximum seconds that an actor gets to delete its data before it is killed."""

P = ParamSpec("P")
T = TypeVar("T")


class SharedActor:
    """Base class of a named actor, which serves the public methods of one object to other processes."""

    CHECK_S: ClassVar[float] = 1.0
    """Seconds between two checks whether the actor is still used."""
    USED_BY: ClassVar[tuple[str, ...] | None] = None
    """Methods whose calls show that the actor is used; None for all."""

    def __init__(self, served: object) -> None:
        self._served = served
        self.silent_s = 0.0
        """Seconds since the last of these calls."""
        self._watching = asyncio.get_event_loop().create_task(self._end_when_unused())

    async def call(self, method: str, *args: Any, **settings: Any) -> Any:
        """Return the result of a method of the served object, or its error, because Ray wraps exceptions in its own."""
        if self.USED_BY is None or method in self.USED_BY:
            self.silent_s = 0.0
        try:
            answer = getattr(self._served, method)(*args, **settings)
            return await answer if isawaitable(answer) else answer
        except MarsRayError as error:
            return error

    def unused(self) -> bool:
        """Return whether nobody needs the actor any more. Subclasses say when."""
        raise NotImplementedError

    async def remove(self) -> None:
        """Delete what has no use after the end of the actor."""

    async def _end_when_unused(self) -> None:
        while not self.unused():
            await asyncio.sleep(self.CHECK_S)
            # Count seconds instead of reading a clock, because a clock keeps running while the machine is suspended.
            self.silent_s += self.CHECK_S
        await self.remove()
        ray.kill(ray.get_runtime_context().current_actor)


class RemoteClient:
    """Base class of clients of an object in another process. Methods made by `remote` send their calls through
    `send`."""

    WITHIN_S: ClassVar[float | None] = 10.0
    """Seconds that a call may take, which may include the start of an actor; None sets no limit."""
    SILENT: ClassVar[str]
    """Sentence about an object that does not answer."""
    UNREACHABLE: ClassVar[tuple[type[Exception], ...]] = (RayError, TimeoutError)
    """Errors of a call that did not reach the object, or whose answer did not arrive."""

    async def send(self, method: str, *args: Any, **settings: Any) -> Any:
        """Return the answer of the object, which may be an error as a value."""
        raise NotImplementedError

    async def ask(self, method: str, within_s: float | None, *args: Any, **settings: Any) -> Any:
        """Return the result of a method.

        Raises the `MarsRayError` of the method, and `UnavailableError` if the object does not answer in time.
        """
        try:
            async with asyncio.timeout(within_s):
                answer = await self.send(method, *args, **settings)
        except self.UNREACHABLE as error:
            raise UnavailableError(f"{self.SILENT} Try again in a few seconds.") from error
        if isinstance(answer, MarsRayError):
            raise answer
        return answer


@overload
def remote(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], within_s: float | None = None
) -> Callable[Concatenate[RemoteClient, P], Coroutine[Any, Any, T]]: ...


@overload
def remote(
    method: Callable[Concatenate[Any, P], T], within_s: float | None = None
) -> Callable[Concatenate[RemoteClient, P], Coroutine[Any, Any, T]]: ...


def remote(
    method: Callable[Concatenate[Any, P], Any], within_s: float | None = None
) -> Callable[Concatenate[RemoteClient, P], Coroutine[Any, Any, Any]]:
    """Return the method of a client that calls `method` of the object, within `within_s` seconds if given."""

    @wraps(method)
    async def call(client: RemoteClient, /, *args: P.args, **settings: P.kwargs) -> Any:
        limit_s = client.WITHIN_S if within_s is None else within_s
        return await client.ask(method.__name__, limit_s, *args, **settings)

    return call


class ActorClient(RemoteClient):
    """Client of the actor `name`. Use it within one event loop.

    The first call starts an actor of the class `kind` with `arguments`, unless an actor has the name already. A call
    that finds the actor dead starts another one. Ray restarts the process of an actor up to `RESTARTS` times; -1 sets
    no limit.
    """

    RESTARTS: ClassVar[int] = -1

    def __init__(self, kind: type[SharedActor], name: str, *arguments: object) -> None:
        self._kind: Any = ray.remote(kind)
        self.name = name
        self._arguments = arguments
        self._handle: Any = None
        self._starting = asyncio.Lock()

    async def send(self, method: str, *args: Any, **settings: Any) -> Any:
        """Return the answer of the actor, which is started if necessary."""
        handle = await self._started()
        try:
            return await handle.call.remote(method, *args, **settings)
        except ActorDiedError:  # the actor ended itself because nobody used it, or was killed for good
            if self._handle is handle:
                self._handle = None
        return await (await self._started()).call.remote(method, *args, **settings)

    async def _started(self) -> Any:
        async with self._starting:
            if self._handle is None:
                self._handle = await asyncio.to_thread(self._start)
        return self._handle

    def _start(self) -> Any:
        actor = self._kind.options(
            name=self.name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=self.RESTARTS,
            num_cpus=0,
            scheduling_strategy="DEFAULT",  # a placement group of the replica that starts it would end with the replica
        )
        return actor.remote(*self._arguments)


class FoundActor(RemoteClient):
    """Client of the actor `name`, which somebody else has started. Use it within one event loop."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def send(self, method: str, *args: Any, **settings: Any) -> Any:
        """Return the answer of the actor."""
        try:
            handle = await asyncio.to_thread(ray.get_actor, self.name, namespace=NAMESPACE)
        except ValueError as error:  # it has ended
            raise TimeoutError from error
        return await handle.call.remote(method, *args, **settings)


async def ask_actors(prefix: str, method: Callable[[Any], T], within_s: float) -> dict[str, T]:
    """Return the answers of the actors whose names begin with `prefix`, without those that do not answer in time."""

    async def ask(name: str) -> Any:
        handle = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
        async with asyncio.timeout(within_s):
            return await handle.call.remote(method.__name__)

    names = await asyncio.to_thread(named_actors, prefix)
    answers = await asyncio.gather(*map(ask, names), return_exceptions=True)
    return {name: answer for name, answer in zip(names, answers, strict=True) if not isinstance(answer, BaseException)}


def kill_actors(prefix: str) -> None:
    """End the actors whose names begin with `prefix`."""
    for name in named_actors(prefix):
        with suppress(ValueError):  # it has ended meanwhile
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def remove_actor(name: str) -> None:
    """Delete the data of the actor `name`, if there is such an actor, and end it."""
    try:
        handle = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return
    ray.wait([handle.remove.remote()], timeout=REMOVE_S)
    ray.kill(handle)


def named_actors(prefix: str) -> list[str]:
    """Return the names of the actors on the cluster that begin with `prefix`."""
    actors = list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)]

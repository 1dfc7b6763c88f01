"""Ray shell: one named, detached Ray actor that holds a `ResponseStore`, and its clients in the gateways.

The actor is started when a response is first stored, and ends itself once all of its responses have expired. Ray
restarts it if its process dies. On the same node it then finds its folder again; if its node died, the store begins
empty.
"""

import asyncio
import time
from contextlib import suppress
from typing import Any

import ray

from mars_ray.errors import MarsRayError, UnavailableError
from mars_ray.platform.responses.response_store import ResponseStore, StoredResponse, Turn, remove_stale
from mars_ray.ray_cluster import temporary_folder
from mars_ray.serve.ray.named_actor import NamedActor, remove_actor
from mars_ray.storage.private import private_folder

CHECK_SECONDS = 60.0
"""Seconds between two checks for expired responses."""


class ResponseStoreActor:
    """The actor that holds the store, in the folder `name` of its node. A restarted actor has the same name."""

    def __init__(self, name: str) -> None:
        # Another account that owned the folder above could put its own in the place of this one.
        stores = private_folder(temporary_folder() / "responses", within=temporary_folder())
        remove_stale(stores)
        self._store = ResponseStore(stores / name)
        self._called_s = time.monotonic()
        self._watching = asyncio.get_event_loop().create_task(self._end_when_empty())

    async def call(self, method: str, *args: Any) -> Any:
        """Return the result of a method of the store, or its error, because Ray wraps exceptions in its own."""
        self._called_s = time.monotonic()
        try:
            return getattr(self._store, method)(*args)
        except MarsRayError as error:
            return error

    async def _end_when_empty(self) -> None:
        empty = False
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            with suppress(UnavailableError):  # try again at the next check
                empty = self._store.drop_expired()
            if empty and time.monotonic() - self._called_s > CHECK_SECONDS:
                self._store.remove()
                ray.kill(ray.get_runtime_context().current_actor)


class RayResponseStore:
    """Client of an application's store, see `ResponseStoreClient`. Use it within one event loop."""

    def __init__(self, app: str) -> None:
        self._actor = NamedActor(ResponseStoreActor, _name(app), title="the store of responses")

    async def put(self, owner: str, stored: StoredResponse) -> bool:
        """Store a response and return whether it fits the bounds."""
        fits: bool = await self._actor.ask("call", "put", owner, stored)
        return fits

    async def get(self, owner: str, id: str) -> str:
        """Return a response object as JSON. Raises `ResponseNotFoundError`."""
        response: str = await self._actor.ask("call", "get", owner, id)
        return response

    async def delete(self, owner: str, id: str) -> None:
        """Delete a response. Raises `ResponseNotFoundError`."""
        await self._actor.ask("call", "delete", owner, id)

    async def chain(self, owner: str, id: str, max_bytes: int) -> list[Turn]:
        """Return the conversation that ends with a response, see `ResponseStore.chain`."""
        turns: list[Turn] = await self._actor.ask("call", "chain", owner, id, max_bytes)
        return turns


def remove_response_store(app: str) -> None:
    """Delete the stored responses of an application that is gone, and end its store."""
    remove_actor(_name(app), "call", "remove")


def _name(app: str) -> str:
    return f"responses:{app}"

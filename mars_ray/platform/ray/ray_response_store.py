"""Ray shell: one named, detached Ray actor that holds a `ResponseStore`, and its clients in the gateways.

The actor is started when a response is first stored, and ends itself once all of its responses have expired. Ray
restarts it if its process dies. On the same node it then finds its folder again; if its node died, the store begins
empty.
"""

import ray

from mars_ray.errors import UnavailableError
from mars_ray.platform.responses.response_store import ResponseStore, remove_stale
from mars_ray.ray_actor import ActorClient, SharedActor, remote, remove_actor
from mars_ray.ray_cluster import temporary_folder
from mars_ray.storage.private import private_folder

CHECK_SECONDS = 60.0
"""Seconds between two checks for expired responses."""


class ResponseStoreActor(SharedActor):
    """The actor that holds the store, in a folder of its node, named by the id that the actor keeps when it is
    restarted."""

    CHECK_S = CHECK_SECONDS

    def __init__(self) -> None:
        # Another account that owned the folder above could put its own in the place of this one.
        stores = private_folder(temporary_folder() / "responses", within=temporary_folder())
        remove_stale(stores)
        self._store = ResponseStore(stores / ray.get_runtime_context().get_actor_id())
        super().__init__(self._store)

    def unused(self) -> bool:
        """Drop the expired responses, and return whether the store is empty and nobody has called for a while."""
        try:
            empty = self._store.drop_expired()
        except UnavailableError:  # try again at the next check
            return False
        return empty and self.silent_s > CHECK_SECONDS

    async def remove(self) -> None:
        """Delete the store."""
        self._store.remove()


class RayResponseStore(ActorClient):
    """Client of an application's store, see `ResponseStoreClient`. Use it within one event loop."""

    SILENT = "the store of responses does not answer."

    put = remote(ResponseStore.put)
    get = remote(ResponseStore.get)
    delete = remote(ResponseStore.delete)
    chain = remote(ResponseStore.chain)

    def __init__(self, app: str) -> None:
        super().__init__(ResponseStoreActor, _name(app))


def remove_response_store(app: str) -> None:
    """Delete the stored responses of an application that is gone, and end its store."""
    remove_actor(_name(app))


def _name(app: str) -> str:
    return f"responses:{app}"

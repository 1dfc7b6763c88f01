"""Ray shell: the named, detached actors of an endpoint's platform, and their clients in the gateways.

Each actor is started by its first caller, and ends itself once nobody needs it. Ray restarts it if its process dies. On
the same node it then finds its folder again; if its node died, what was in the folder is lost.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import ray
from ray import serve

from mars_ray.errors import UnavailableError
from mars_ray.platform.models.manager import application_prefix
from mars_ray.platform.responses.response_store import ResponseStore, remove_stale
from mars_ray.platform.usage.gateway_meter import RENEW_S
from mars_ray.platform.usage.ledger import UsageLedger
from mars_ray.platform.usage.ledger_files import usage_folder
from mars_ray.platform.usage.meter import UsageMeter
from mars_ray.ray_actor import ActorClient, SharedActor, named_actors, remote, remove_actor
from mars_ray.ray_cluster import temporary_folder
from mars_ray.storage.private import private_folder

IDLE_S = 300.0
SETTLE_S = RENEW_S + 1.0
"""Seconds in which gateways introduce themselves to a restarted meter. Idle gateways call every `RENEW_S` seconds."""
CHECK_SECONDS = 60.0
"""Seconds between two checks for expired responses."""


def actor_folder(kind: str) -> Path:
    """Return the folder of the node with the folders of all actors of this kind.

    It must be private too, because its owner could put another folder in the place of an actor's.
    """
    return private_folder(temporary_folder() / kind, within=temporary_folder())


class MeterActor(SharedActor):
    """The actor that holds the meter. Without `storage`, the ledger is in a folder of its node, named by the id that
    the actor keeps when it is restarted."""

    CHECK_S = IDLE_S / 10

    def __init__(self, storage: str | None) -> None:
        context = ray.get_runtime_context()
        self._folder = actor_folder("usage") / context.get_actor_id() if storage is None else None
        ledger = UsageLedger(self._folder or usage_folder(storage or ""))
        settle_s = SETTLE_S if context.was_current_actor_reconstructed else 0.0
        super().__init__(UsageMeter(ledger, settle_s=settle_s))

    def unused(self) -> bool:
        """Return whether no gateway has called for `IDLE_S` seconds."""
        return self.silent_s >= IDLE_S

    async def remove(self) -> None:
        """Delete counts that have no storage."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


class RayMeter(ActorClient):
    """Client of an application's meter, see `MeterLink`. Use it within one event loop."""

    SILENT = "the meter of usage does not answer."

    sync = remote(UsageMeter.sync)
    record = remote(UsageMeter.record)
    report = remote(UsageMeter.report)

    def __init__(self, app: str, storage: str | None) -> None:
        # An endpoint whose storage changes gets another actor, because a running one keeps its ledger.
        suffix = "" if storage is None else f":{hashlib.sha256(storage.encode()).hexdigest()[:12]}"
        super().__init__(MeterActor, f"meter:{app}{suffix}", storage)


class ResponseStoreActor(SharedActor):
    """The actor that holds the store, in a folder of its node, named by the id that the actor keeps when it is
    restarted."""

    CHECK_S = CHECK_SECONDS

    def __init__(self) -> None:
        stores = actor_folder("responses")
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
        super().__init__(ResponseStoreActor, f"responses:{app}")


def clean_up(controller: str, delete: Callable[[str], None]) -> None:
    """Delete the engines of further models, the stored responses and the meter of an endpoint, by its controller."""
    further = application_prefix(controller)
    for other in [other for other in serve.status().applications if other.startswith(further)]:
        delete(other)
    for actor in (f"responses:{controller}", f"meter:{controller}", *named_actors(f"meter:{controller}:")):
        remove_actor(actor)

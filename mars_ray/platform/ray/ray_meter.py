"""Ray shell: one named, detached Ray actor that holds a `UsageMeter`, and its clients in the gateways.

The actor is started by the first gateway, and ends itself once no gateway has called for `IDLE_S` seconds. Ray restarts
it if its process dies.
"""

import shutil
from pathlib import Path

import ray

from mars_ray.platform.usage.ledger import UsageLedger
from mars_ray.platform.usage.ledger_files import usage_folder
from mars_ray.platform.usage.meter import UsageMeter
from mars_ray.ray_actor import ActorClient, SharedActor, remote, remove_actor
from mars_ray.ray_cluster import temporary_folder
from mars_ray.storage.private import private_folder

IDLE_S = 300.0
SETTLE_S = 3.0
"""Seconds in which gateways introduce themselves to a restarted meter. A gateway tries again more often than that."""


class MeterActor(SharedActor):
    """The actor that holds the meter. Without `storage`, the ledger is in a folder of its node, named by the id that
    the actor keeps when it is restarted."""

    CHECK_S = IDLE_S / 10

    def __init__(self, storage: str | None) -> None:
        context = ray.get_runtime_context()
        self._folder: Path | None = None
        if storage is None:
            # The parent must be private too, because its owner could swap this folder.
            folders = private_folder(temporary_folder() / "usage", within=temporary_folder())
            self._folder = folders / context.get_actor_id()
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
        super().__init__(MeterActor, _name(app), storage)


def remove_meter(app: str) -> None:
    """End the meter of an application that is gone. Counts that no storage keeps are deleted."""
    remove_actor(_name(app))


def _name(app: str) -> str:
    return f"meter:{app}"

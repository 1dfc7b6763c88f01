"""Ray shell: one named, detached Ray actor that holds a `UsageMeter`, and its clients in the gateways.

The actor is started by the first gateway, and ends itself once no gateway has called for `IDLE_S` seconds. Ray restarts
it if its process dies.
"""

import asyncio
import shutil
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray

from mars_ray.errors import MarsRayError
from mars_ray.platform.usage.ledger import UsageLedger
from mars_ray.platform.usage.ledger_files import usage_folder
from mars_ray.platform.usage.meter import MeterMessage, MeterReply, UsageMeter
from mars_ray.platform.usage.usage_report import UsageQuery
from mars_ray.platform.usage.usage_rows import UsageRecord, UsageSums
from mars_ray.ray_cluster import temporary_folder
from mars_ray.serve.ray.named_actor import NamedActor, remove_actor
from mars_ray.storage.private import private_folder

T = TypeVar("T")

IDLE_S = 300.0
SETTLE_S = 3.0
"""Seconds in which gateways introduce themselves to a restarted meter. A gateway tries again more often than that."""


class MeterActor:
    """The actor that holds the meter. Without `storage`, the ledger is in the folder `name` of its node."""

    def __init__(self, storage: str | None, name: str) -> None:
        self._folder: Path | None = None
        if storage is None:
            # Another account that owned the folder above could put its own in the place of this one.
            folders = private_folder(temporary_folder() / "usage", within=temporary_folder())
            self._folder = folders / name
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        ledger = UsageLedger(self._folder or usage_folder(storage or ""))
        self._meter = UsageMeter(ledger, settle_s=SETTLE_S if restarted else 0.0)
        self._called_s = time.monotonic()
        self._watching = asyncio.get_event_loop().create_task(self._end_when_idle())

    async def sync(self, message: MeterMessage) -> MeterReply | MarsRayError:
        """Decide about requests. Returns errors, because Ray wraps exceptions in its own."""
        return await self._returned(self._meter.sync(message))

    async def record(self, records: Sequence[UsageRecord]) -> MarsRayError | None:
        """Add records of usage to the counts."""
        return await self._returned(self._meter.record(records))

    async def report(self, query: UsageQuery, account: str | None) -> UsageSums | MarsRayError:
        """Return the sums of the usage that a query selects."""
        return await self._returned(self._meter.report(query, account))

    async def remove(self) -> None:
        """Delete counts that have no storage."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _returned(self, work: Coroutine[Any, Any, T]) -> T | MarsRayError:
        self._called_s = time.monotonic()
        try:
            return await work
        except MarsRayError as error:
            return error

    async def _end_when_idle(self) -> None:
        while time.monotonic() - self._called_s < IDLE_S:
            await asyncio.sleep(IDLE_S / 10)
        await self.remove()
        ray.kill(ray.get_runtime_context().current_actor)


class RayMeter:
    """Client of an application's meter, see `MeterLink`. Use it within one event loop."""

    def __init__(self, app: str, storage: str | None) -> None:
        self._actor = NamedActor(MeterActor, _name(app), storage, title="the meter of usage")

    async def sync(self, message: MeterMessage) -> MeterReply:
        """Send a message."""
        reply: MeterReply = await self._actor.ask("sync", message)
        return reply

    async def record(self, records: Sequence[UsageRecord]) -> None:
        """Add records of usage to the counts."""
        await self._actor.ask("record", records)

    async def report(self, query: UsageQuery, account: str | None) -> UsageSums:
        """Return the sums of the usage that a query selects."""
        sums: UsageSums = await self._actor.ask("report", query, account)
        return sums


def remove_meter(app: str) -> None:
    """End the meter of an application that is gone. Counts that no storage keeps are deleted."""
    remove_actor(_name(app), "remove")


def _name(app: str) -> str:
    return f"meter:{app}"

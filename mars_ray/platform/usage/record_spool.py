"""Records of one gateway on their way to the meter.

In:    records of requests that have ended.
Out:   calls of the meter, one at a time, each repeated until the meter confirms it.
Never: drops a record, or sends the usage of a request under two ids. Beyond `SPOOL_RECORDS` records, those that were
       never sent are added up by day, account, key and model, so that memory is bounded.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

from mars_ray.errors import UnavailableError
from mars_ray.platform.usage.meter import MeterLink
from mars_ray.platform.usage.usage_rows import UsageGroup, UsageRecord, UsageSums, add_up
from mars_ray.serve.http.streams import cancel_tasks

log = logging.getLogger(__name__)

AT_ONCE = 256
"""Maximum number of records in one call."""
SPOOL_RECORDS = 20_000
RETRY_S = 0.2
LONGEST_RETRY_S = 2.0


class RecordSpool:
    """The records of one gateway. Use it within one event loop, inside `async with spool.running(...)`.

    `release` gets the ids of reservations whose usage was stored under another id.
    """

    def __init__(self, link: MeterLink, release: Callable[[list[str]], None]) -> None:
        self._link = link
        self._release = release
        self._reserved: set[str] = set()
        """Ids of waiting records, added up or not, that end a reservation."""
        self._summed: dict[str, list[str]] = {}
        """Ids of these reservations by the id of the sum that holds them."""
        self._waiting: list[UsageRecord] = []
        self._sending: list[UsageRecord] = []
        self._confirmations: dict[str, asyncio.Future[None]] = {}
        self._news = asyncio.Event()
        self._away = False

    @asynccontextmanager
    async def running(self, flush_s: float) -> AsyncIterator[None]:
        """Send records within the block, and at its end for up to `flush_s` seconds more."""
        sending = asyncio.create_task(self._send_forever())
        try:
            yield
        finally:
            ends_s = time.monotonic() + flush_s
            while self.waiting and time.monotonic() < ends_s:
                await asyncio.sleep(0.01)
            await cancel_tasks(sending)
            if self.waiting:
                log.error("the meter of usage did not answer: the usage of %d requests or more is lost", self.waiting)

    @property
    def waiting(self) -> int:
        """Number of records that the meter has not confirmed."""
        return len(self._waiting) + len(self._sending)

    def holds(self, id: str) -> bool:
        """Return whether a record waits, added up or not, that ends the reservation `id`."""
        return id in self._reserved

    def add(self, record: UsageRecord, *, reserved: bool) -> None:
        """Add a record that nobody waits for; `reserved` says whether it ends a reservation."""
        if reserved:
            self._reserved.add(record.id)
        self._waiting.append(record)
        if len(self._waiting) > SPOOL_RECORDS:
            self._add_up()
        self._news.set()

    async def confirmed(self, record: UsageRecord, seconds: float, *, reserved: bool) -> None:
        """Add a record and wait up to `seconds` until it is durable. While the meter is away, do not wait at all."""
        self.add(record, reserved=reserved)
        if self._away:
            return
        confirmation = self._confirmations[record.id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await confirmation
        except TimeoutError:
            if not self._away:
                log.error("the meter of usage does not answer: answers no longer wait until their usage is stored")
            self._away = True
        finally:
            del self._confirmations[record.id]

    async def _send_forever(self) -> None:
        retry_s = RETRY_S
        while True:
            if not self._sending:
                await self._news.wait()
                self._news.clear()
                self._sending = self._waiting[:AT_ONCE]
                del self._waiting[:AT_ONCE]
            try:
                if self._sending:
                    await self._link.record(self._sending)
            except UnavailableError:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
                continue
            self._confirm()
            retry_s = RETRY_S

    def _confirm(self) -> None:
        if self._away:
            log.warning("the meter of usage answers again")
        self._away = False
        for record in self._sending:
            ids = self._summed.pop(record.id, [])
            if ids:
                self._release(ids)
            self._reserved.difference_update(ids, [record.id])
            confirmation = self._confirmations.get(record.id)
            if confirmation and not confirmation.done():
                confirmation.set_result(None)
        self._sending = []
        if self._waiting:
            self._news.set()

    def _add_up(self) -> None:
        sums: UsageSums = {}
        reserved: dict[UsageGroup, list[str]] = {}
        kept: list[UsageRecord] = []
        for record in self._waiting:
            if record.id in self._confirmations:
                kept.append(record)
                continue
            add_up(sums, [(record.group, record.counts)])
            ids = [record.id] if record.id in self._reserved else self._summed.pop(record.id, [])
            reserved.setdefault(record.group, []).extend(ids)
        self._waiting = kept
        for group, counts in sums.items():
            total = UsageRecord(uuid4().hex, group, counts)
            self._summed[total.id] = reserved[group]
            self._waiting.append(total)

"""The meter of all gateways of an endpoint: limits at admission, and durable counts of answered requests.

In:    messages of gateways, each of which may arrive more than once.
Out:   grants and refusals; sums of usage.
Never: counts a request twice, or confirms a record before it is durable.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from mars_ray.errors import QueueFullError, RequestError
from mars_ray.platform.usage.ledger import LedgerView, UsageLedger
from mars_ray.platform.usage.limiter import Granted, LimitedRequest, LimitRefusal, RecentRequest, UsageLimiter
from mars_ray.platform.usage.usage_report import UsageQuery, grouped
from mars_ray.platform.usage.usage_rows import UsageRecord, UsageSums

REPORT_ROWS = 20_000
"""Maximum number of rows of a report over HTTP, because a gateway holds and sends them whole."""

REPORTS = 2
"""Maximum number of reports in progress or waiting. An account has at most one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterMessage:
    """Requests to admit and records to store, in one message from a gateway."""

    gateway: str
    """Unique name of the gateway's process."""
    number: int
    """Number of the message, which rises from one message of the gateway to the next."""
    requests: Sequence[LimitedRequest] = ()
    ended: Sequence[str] = ()
    """Ids of requests that ended without an answer. They used no tokens."""
    recent: Sequence[RecentRequest] | None = None
    """The requests that the gateway has admitted in the last minute or that hold quota; None unless the meter asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterReply:
    """Answer to a `MeterMessage`."""

    introduce: bool = False
    """The meter does not know the gateway, or not since it was silent: send the message again, with `recent`. Nothing
    was decided."""
    wait: bool = False
    """The meter has just restarted and waits for the other gateways: send the requests again. They were not decided."""
    answers: Mapping[str, Granted | LimitRefusal] = field(default_factory=dict)
    """Decisions by the id of the request."""


class MeterLink(Protocol):
    """Way to a meter, wherever it runs. All methods raise `UnavailableError` if the meter does not answer."""

    async def sync(self, message: MeterMessage) -> MeterReply:
        """Send a message, see `UsageMeter.sync`."""

    async def record(self, records: Sequence[UsageRecord]) -> None:
        """Count records, see `UsageMeter.record`."""

    async def report(self, query: UsageQuery, account: str | None) -> UsageSums:
        """Return the sums of a report, see `UsageMeter.report`."""


class UsageMeter:
    """The meter. Use it within one event loop. The ledger runs in a thread of its own, and so do reports, so that they
    do not delay counting.

    A meter that follows one that died decides nothing in its first `settle_s` seconds, in which the gateways introduce
    themselves. All methods raise `UnavailableError` while the ledger cannot be read or written.
    """

    def __init__(self, ledger: UsageLedger, *, settle_s: float = 0.0) -> None:
        self._ledger = ledger
        self._limiter = UsageLimiter(ledger.spent, time.monotonic)
        self._settled_s = time.monotonic() + settle_s
        self._newest = Counter[str]()
        """Number of the newest message by gateway."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="usage-ledger")
        self._report_thread = ThreadPoolExecutor(1, thread_name_prefix="usage-report")
        self._reporting: set[str | None] = set()
        self._waiting: list[tuple[Sequence[UsageRecord], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def sync(self, message: MeterMessage) -> MeterReply:
        """Decide about the requests of a gateway."""
        self._newest[message.gateway] = max(message.number, self._newest[message.gateway])
        if not self._limiter.knows(message.gateway):
            if message.recent is None:
                return MeterReply(introduce=True)
            # A record may be stored before its request is introduced. Then nothing would free what the request holds.
            recent = [
                replace(admitted, running=admitted.running and not self._ledger.remembers(admitted.request.id))
                for admitted in message.recent
            ]
            self._limiter.introduce(message.gateway, recent)
        for id in message.ended:
            self._limiter.settle(id, 0)
        if time.monotonic() < self._settled_s:
            return MeterReply(wait=True)
        if message.requests and not self._ledger.opened:
            await self._run(self._ledger.open)
        if message.number < self._newest[message.gateway]:
            # The gateway no longer waits for this reply, and a newer message may have ended the requests of this one.
            return MeterReply(wait=True)
        return MeterReply(
            answers={request.id: self._limiter.admit(message.gateway, request) for request in message.requests}
        )

    async def record(self, records: Sequence[UsageRecord]) -> None:
        """Count records whose ids are unknown, and end their reservations. Returns once the records are durable.

        Records that arrive while others are written are written together, so that a slow store limits no throughput.
        """
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((records, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await written

    async def report(self, query: UsageQuery, account: str | None) -> UsageSums:
        """Return the sums of a report, of one account or of all if `account` is None.

        Raises `RequestError` if it has more than `REPORT_ROWS` rows, and `QueueFullError` while a report of the same
        account or `REPORTS` others are made.
        """
        if account in self._reporting or len(self._reporting) >= REPORTS:
            whose = "this account" if account in self._reporting else "other accounts"
            raise QueueFullError(f"the usage of {whose} is being added up for another request. Try again later.")
        self._reporting.add(account)
        making = asyncio.create_task(self._report(query, account))
        making.add_done_callback(lambda _: self._reporting.discard(account))
        return await asyncio.shield(making)  # the thread goes on, although its caller may leave

    async def _report(self, query: UsageQuery, account: str | None) -> UsageSums:
        loop = asyncio.get_running_loop()
        view = await loop.run_in_executor(self._thread, self._ledger.view)
        return await loop.run_in_executor(self._report_thread, _report_rows, view, query, account)

    async def _write(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            records = [record for batch, _ in waiting for record in batch]
            try:
                await self._run(lambda: self._ledger.append(records))  # noqa: B023  # it ends before the next round
            except Exception as error:
                for _, written in waiting:
                    if not written.done():
                        written.set_exception(error)
                continue
            for record in records:
                self._limiter.settle(record.id, record.counts.tokens)
            for _, written in waiting:
                if not written.done():
                    written.set_result(None)

    async def _run(self, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _report_rows(view: LedgerView, query: UsageQuery, account: str | None) -> UsageSums:
    groups = grouped(view.rows(query.start, query.end, account), query.by)
    if len(groups) > REPORT_ROWS:
        raise RequestError(
            f"the report has {len(groups)} rows; it may have up to {REPORT_ROWS}. Ask for fewer days or columns."
        )
    return groups

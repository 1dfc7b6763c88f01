"""Send the requests of a plan to an endpoint.

In a closed loop, requests have no arrival times: each client sends its next request when its previous one has ended. In
an open loop, requests are sent in order of arrival, up to `clients` at a time. If a request waits for a client, its
latency is still measured from its arrival.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import aiohttp

from mars_ray.load.client import Target, ask, open_session
from mars_ray.load.record import PlannedRequest, RequestOutcome, RequestRecord
from mars_ray.load.reply import ReplyRecorder

PAUSE_WITHOUT_CONNECTION_S = 0.1
"""Pause of a closed-loop client after a failed connection, so that it does not retry thousands of times per second."""


class Clients:
    """Pool of `count` clients, each with one request in flight. Requests get clients in order of arrival.

    The number of clients is unlimited if `count` is None.
    """

    def __init__(self, count: int | None, now: Callable[[], float]) -> None:
        self._free = None if count is None else asyncio.Semaphore(count)
        self._now = now
        self._busy_until_s = 0.0
        """Time at which a client was last granted to a request that had to wait."""

    async def take(self, scheduled_s: float | None) -> bool:
        """Wait for a client. Return True if no client was free when the request was due, at `scheduled_s`."""
        if self._free is None:
            assert scheduled_s is not None, "a closed loop needs a number of clients"
            return False
        blocked = self._free.locked()
        # While an earlier request waited, no client was free for a request due then, even if one is free now.
        waited = blocked or (scheduled_s is not None and scheduled_s < self._busy_until_s)
        await self._free.acquire()
        if blocked:
            self._busy_until_s = self._now()
        return waited and scheduled_s is not None

    def give_back(self) -> None:
        """Free a client."""
        if self._free is not None:
            self._free.release()


async def run_load(
    target: Target,
    requests: Iterable[PlannedRequest],
    *,
    clients: int | None = None,
    duration_s: float | None = None,
    stop: asyncio.Event | None = None,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Send all requests, wait for the replies, and return one record per request.

    After `duration_s`, no new requests are sent, but requests in flight complete. When `stop` is set, requests in
    flight end immediately and count as interrupted.
    """
    async with open_session(target.api_key) as session:
        load = _Load(session, target, clients, duration_s, on_record)
        await _until(stop or asyncio.Event(), load.run(requests))
    return sorted(load.records, key=lambda record: record.number)


class _Load:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        clients: int | None,
        duration_s: float | None,
        on_record: Callable[[RequestRecord], None] | None,
    ) -> None:
        self._session = session
        self._target = target
        self._on_record = on_record
        self._clients = Clients(clients, self._now)
        self._duration_s = float("inf") if duration_s is None else duration_s
        self._start_s = asyncio.get_running_loop().time()
        self.records: list[RequestRecord] = []

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    async def run(self, requests: Iterable[PlannedRequest]) -> None:
        """Send the requests one after another and wait for the last reply."""
        async with asyncio.TaskGroup() as in_flight:
            for number, request in enumerate(requests):
                if request.scheduled_s is not None:
                    if request.scheduled_s >= self._duration_s:
                        return
                    await asyncio.sleep(request.scheduled_s - self._now())
                waited = await self._clients.take(request.scheduled_s)
                if request.scheduled_s is None and self._now() >= self._duration_s:
                    return
                in_flight.create_task(self._send(number, request, waited))

    async def _send(self, number: int, request: PlannedRequest, waited: bool) -> None:
        payload = self._target.payload(request)
        reply = ReplyRecorder(number, request.scheduled_s, waited, self._now())
        try:
            await ask(self._session, self._target, payload, reply, self._now)
        finally:
            record = reply.record(self._now())
            self.records.append(record)
            if self._on_record is not None:
                self._on_record(record)
        if record.outcome is RequestOutcome.CONNECTION and request.scheduled_s is None:
            await asyncio.sleep(PAUSE_WITHOUT_CONNECTION_S)
        self._clients.give_back()


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it when `stop` is set. No task is left running."""
    running = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        running.cancel()  # no effect if the work is done
        await asyncio.gather(running, stopped, return_exceptions=True)
    if not running.cancelled():
        running.result()

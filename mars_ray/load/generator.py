"""Send the requests of a plan to an endpoint: the load generator, for the benchmark and for tests of a server.

Closed loop: requests without an arrival; each client sends the next one when its last has ended. Open loop: requests
with an arrival, in order of it; `clients` bounds how many are under way, None is no bound. In an open loop a slow
server delays no request unless all clients are busy, and then its latency counts from its arrival all the same.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import aiohttp

from mars_ray.load.client import Target, ask, open_session
from mars_ray.load.clients import Clients
from mars_ray.load.record import PlannedRequest, RequestOutcome, RequestRecord
from mars_ray.load.reply import ReplyRecorder

PAUSE_WITHOUT_CONNECTION_S = 0.1
"""A client of a closed loop that finds nobody waits before it tries again: a server that is down is refused thousands
of times a second otherwise."""


async def run_load(
    target: Target,
    requests: Iterable[PlannedRequest],
    *,
    clients: int | None = None,
    duration_s: float | None = None,
    stop: asyncio.Event | None = None,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Send all requests and wait for their answers.

    No request is sent that arrives, or in a closed loop would be sent, after `duration_s`; those under way then end.
    Once `stop` is set those under way end at once, as interrupted.
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
        self._session, self._target, self._on_record = session, target, on_record
        self._clients = Clients(clients, self._now)
        self._duration_s = float("inf") if duration_s is None else duration_s
        self._began_s = asyncio.get_running_loop().time()
        self.records: list[RequestRecord] = []

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    async def run(self, requests: Iterable[PlannedRequest]) -> None:
        """Begin one request after another; end with the last of them."""
        async with asyncio.TaskGroup() as under_way:
            for number, request in enumerate(requests):
                if request.scheduled_s is not None:
                    if request.scheduled_s >= self._duration_s:
                        return
                    await asyncio.sleep(request.scheduled_s - self._now())
                waited = await self._clients.take(request.scheduled_s)
                if request.scheduled_s is None and self._now() >= self._duration_s:
                    return
                under_way.create_task(self._one(number, request, waited))

    async def _one(self, number: int, request: PlannedRequest, waited: bool) -> None:
        payload = self._target.payload(request)
        seen = ReplyRecorder(number, request.scheduled_s, waited, self._now())
        try:
            await ask(self._session, self._target, payload, seen, self._now)
        finally:
            record = seen.record(self._now())
            self.records.append(record)
            if self._on_record is not None:
                self._on_record(record)
        if record.outcome is RequestOutcome.CONNECTION and request.scheduled_s is None:
            await asyncio.sleep(PAUSE_WITHOUT_CONNECTION_S)
        self._clients.give_back()


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it when `stop` is set; leave nothing running either way."""
    running, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        running.cancel()  # nothing, when it is done
        await asyncio.gather(running, stopped, return_exceptions=True)
    if not running.cancelled():
        running.result()

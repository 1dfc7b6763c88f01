"""Merge streams, send them as server-sent events, and stop when the client disconnects.

In:    asynchronous generators; an ASGI `receive`.
Out:   one generator; a result, unless the client disconnected first.
Never: leaves a task or a generator behind.

Plain asyncio and not anyio: its task groups raise exception groups, and callers here need the first error as it is;
a task group may not be open across the `yield` of a generator either, which `merge_streams` would need.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all `streams` as they come, each with the number of its stream. The first error ends all."""
    # One place for items: a stream is read no faster than its reader takes it. A semaphore gives it to who waits the
    # longest; a queue with one place would let a stream that always has an item keep all others out.
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    place = asyncio.Semaphore(1)

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await place.acquire()
                    arrived.put_nowait((number, item))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                place.release()
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def limited_stream(limit: asyncio.Semaphore, stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield the items of `stream` while holding `limit`."""
    async with limit, aclosing(stream):
        async for item in stream:
            yield item


async def limited_call(limit: asyncio.Semaphore, call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`, made while holding `limit`."""
    async with limit:
        return await call()


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results in order. The first error cancels the rest."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. Cancels it and raises `ClientDisconnect` when the client disconnects first."""
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnected. The body of the request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


WRITE_SECONDS = 30.0
"""Seconds after which a client that reads nothing counts as disconnected."""

DONE = "[DONE]"


class EventStreamResponse(Response):
    """Sends `events` and closes the generator at its end, or when the client disconnects or stops reading."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Run to the end of the stream or of the client, whichever comes first."""
        with suppress(ClientDisconnect, OSError, TimeoutError):
            await run_unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await _write(send, f"data: {event}\n\n".encode(), more=True)
            await _write(send, b"", more=False)
        finally:
            await self._events.aclose()


async def _write(send: Send, body: bytes, *, more: bool) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": more})

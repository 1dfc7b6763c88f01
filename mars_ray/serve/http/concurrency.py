"""Await several streams at once, and stop when the client disconnects.

In:    asynchronous generators; an ASGI `receive`.
Out:   one generator; a result, unless the client disconnected first.
Never: leaves a task or a generator behind.

Plain asyncio and not anyio: its task groups raise exception groups, and callers here need the first error as it is;
a task group may not be open across the `yield` of a generator either, which `merge_streams` would need.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield what any of `streams` yields, with the number of the stream. The first error ends all."""
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
    """Yield what `stream` yields, and hold a place of `limit` from its first item to its end."""
    async with limit, aclosing(stream):
        async for item in stream:
            yield item


async def limited_call(limit: asyncio.Semaphore, call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`, and hold a place of `limit` while it runs."""
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

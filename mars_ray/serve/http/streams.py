"""Merge streams, send them as server-sent events, and stop when the client disconnects.

In:    asynchronous generators; an ASGI `receive`.
Out:   one generator; a result, unless the client disconnected first.
Never: leaves a task or a generator running.

This uses plain asyncio instead of anyio, because anyio's task groups raise exception groups and callers here need the
first error itself. A task group also must not stay open across a generator's `yield`, as `merge_streams` would need.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all `streams` as they arrive, each with the index of its stream. The first error ends
    all streams."""
    # Hold at most one item, so that streams are read no faster than the items are consumed. The semaphore gives the
    # next turn to the stream that has waited longest. With a queue of size 1, a stream that always has an item could
    # starve the others.
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    turn = asyncio.Semaphore(1)

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await turn.acquire()
                    arrived.put_nowait((number, item))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                turn.release()
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def limited_stream(limit: asyncio.Semaphore, stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield the items of `stream` while holding the semaphore `limit`."""
    async with limit, aclosing(stream):
        async for item in stream:
            yield item


async def limited_call(limit: asyncio.Semaphore, call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`, and hold the semaphore `limit` while it runs."""
    async with limit:
        return await call()


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results in order. The first error cancels the rest."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancels `work` and raises `ClientDisconnect`."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_wait_for_disconnect(receive))
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
    """Wait until the client disconnects. The body of the request must already have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


WRITE_SECONDS = 30.0
"""Seconds after which a client that reads nothing counts as disconnected."""

DONE = "[DONE]"


class NamedEvent(NamedTuple):
    """An event with a name, which clients of Anthropic's API read the event's type from."""

    name: str
    data: str


def sent_event(event: BaseModel) -> str | NamedEvent:
    """Return an object as an event of a stream, named after its type if it has one."""
    data = event.model_dump_json(exclude_unset=True)
    name = getattr(event, "type", None)
    return data if name is None else NamedEvent(name, data)


class EventStreamResponse(Response):
    """Response that sends `events`. Closes the generator at the end, or if the client disconnects or stops reading."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str | NamedEvent, None], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the stream ends or the client disconnects."""
        with suppress(ClientDisconnect):
            await run_unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        try:
            await _deliver(
                send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for event in self._events:
                text = f"data: {event}" if isinstance(event, str) else f"event: {event.name}\ndata: {event.data}"
                await _write(send, f"{text}\n\n".encode(), more=True)
            await _write(send, b"", more=False)
        finally:
            await self._events.aclose()


async def _write(send: Send, body: bytes, *, more: bool) -> None:
    await _deliver(send, {"type": "http.response.body", "body": body, "more_body": more})


async def _deliver(send: Send, message: Message) -> None:
    """Send a message. Raises `ClientDisconnect` for a client that left or does not read."""
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await send(message)
    except (OSError, TimeoutError):
        raise ClientDisconnect from None

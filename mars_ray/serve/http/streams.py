"""Merge the items of several calls, send events, and stop when the client disconnects.

In:    calls; a generator of events; an ASGI `receive`.
Out:   items as they arrive; a response; a result, unless the client disconnected first.
Never: leaves a task or a generator running.

This uses plain asyncio instead of anyio, because anyio's task groups raise exception groups and callers here need the
first error itself. A task group also must not stay open across a generator's `yield`, as the events of an answer need.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")


class MergedCalls(Generic[T]):
    """The items that several calls give to a function, as they arrive, each with the index of its call.

    At most one item is held, so that calls give no more than is taken. The calls run from the beginning, `at_once` at a
    time, until `close`.
    """

    def __init__(
        self, calls: Sequence[Callable[[Callable[[T], Awaitable[None]]], Awaitable[None]]], at_once: int = 1
    ) -> None:
        self._arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
        # The semaphore gives the next turn to the call that has waited longest. With a queue of size 1, a call that
        # always has an item could starve the others.
        self._turn = asyncio.Semaphore(1)
        self._running = len(calls)
        limit = asyncio.Semaphore(at_once)

        async def run(number: int, call: Callable[[Callable[[T], Awaitable[None]]], Awaitable[None]]) -> None:
            async def take(item: T) -> None:
                await self._turn.acquire()
                self._arrived.put_nowait((number, item))

            try:
                async with limit:
                    await call(take)
                self._arrived.put_nowait(None)
            except Exception as error:
                self._arrived.put_nowait(error)

        self._tasks = [asyncio.create_task(run(number, call)) for number, call in enumerate(calls)]

    async def next(self) -> tuple[int, T] | None:
        """Return the next item, or None after the last one. Raises the first error of a call."""
        while self._running:
            item = await self._arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                self._turn.release()
                return item
            self._running -= 1
        return None

    async def close(self) -> None:
        """Cancel the calls that still run."""
        await cancel_tasks(*self._tasks)


async def cancel_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results in order. The first error cancels the rest."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_tasks(*tasks)


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
        await cancel_tasks(working, leaving)


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


async def _nothing() -> None:
    pass


class EventStreamResponse(Response):
    """Response that sends `events`.

    It closes the generator and calls `close` at the end, or if the client disconnects or stops reading. `close` frees
    what the generator uses, because a generator that has not begun runs no code when it is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str | NamedEvent, None],
        headers: Mapping[str, str],
        close: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the stream ends or the client disconnects."""
        try:
            with suppress(ClientDisconnect):
                await run_unless_disconnected(receive, self._send(send))
        finally:
            await self._events.aclose()
            await self._close()

    async def _send(self, send: Send) -> None:
        await _deliver(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            text = f"data: {event}" if isinstance(event, str) else f"event: {event.name}\ndata: {event.data}"
            await _write(send, f"{text}\n\n".encode(), more=True)
        await _write(send, b"", more=False)


async def _write(send: Send, body: bytes, *, more: bool) -> None:
    await _deliver(send, {"type": "http.response.body", "body": body, "more_body": more})


async def _deliver(send: Send, message: Message) -> None:
    """Send a message. Raises `ClientDisconnect` for a client that left or does not read."""
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await send(message)
    except (OSError, TimeoutError):
        raise ClientDisconnect from None

"""A response of server-sent events: one `data:` line per event, sent as it comes.

In:    texts, and a client that may disconnect or stop reading.
Out:   an ASGI response.
Never: goes on once the client disconnected, or waits for it longer than `WRITE_SECONDS`.

Ours and not sse-starlette: that one runs pings and a shutdown watcher beside every response, and cuts streams off when
the server is asked to stop; here they are drained.

Format: HTML standard, section 9.2.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mars_ray.serve.http.concurrency import run_unless_disconnected

WRITE_SECONDS = 30.0
"""A client that takes nothing for so long is gone, whatever TCP says."""

DONE = "[DONE]"


class EventStreamResponse(Response):
    """Sends what `events` yields. The generator is closed when it ends, the client disconnects, or it stops reading."""

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

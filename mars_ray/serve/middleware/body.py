"""Read the body of a request, whole or while it arrives.

In:    the headers and `receive` of a request, a size limit and a time limit.
Out:   the body; an `ApiError` if it is too large (413) or too slow (408); None if the client disconnected.
Never: keeps more than the limit plus one message from the server, or reads a body whose content-length is too large.

Ray Serve's proxy reads ahead of an app that is slower than the client, and queues what it has read: at most one whole
body.
"""

import asyncio
from contextlib import suppress

from starlette.types import Message, Receive

from mars_ray.openai_api.api_error import ApiError
from mars_ray.serve.middleware.scope import Headers, values

LENGTH_DIGITS = 18
"""Maximum number of digits of a content-length. A longer one counts as too large without being parsed, because int()
raises for thousands of digits."""

DRAIN_BYTES = 16 << 20
DRAIN_SECONDS = 5.0


def has_body(headers: Headers) -> bool:
    """Return whether the headers announce a body."""
    lengths = values(headers, b"content-length")
    return any(length.strip(b"0") for length in lengths) or bool(values(headers, b"transfer-encoding"))


async def read_body(headers: Headers, receive: Receive, *, limit_bytes: int, seconds: float) -> bytes | None:
    """Return the whole body, or None if the client disconnected. Uses a content-length only to refuse a body early."""
    _check_length(headers, limit_bytes)
    # Use one buffer: a list would add some 40 bytes per part, and clients can send very small parts.
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body") or b""
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes)
                more = message.get("more_body", False)
    except TimeoutError:
        raise _too_slow(f"The body did not arrive within {seconds:g} s.") from None
    return bytes(body)


class BodyStream:
    """The body of a request for an app that reads it while it arrives.

    The constructor and `receive` raise an `ApiError` if the body is too large (413), or if no part of it arrives for
    `stall_seconds` (408).
    """

    def __init__(self, headers: Headers, receive: Receive, *, limit_bytes: int, stall_seconds: float) -> None:
        _check_length(headers, limit_bytes)
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._stall_seconds = stall_seconds
        self._bytes = 0
        self.unread = has_body(headers)
        """Whether a part of the body may still arrive."""

    async def receive(self) -> Message:
        """Return the next message of the server."""
        if not self.unread:
            return await self._receive()
        try:
            async with asyncio.timeout(self._stall_seconds):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow(f"No part of the body arrived for {self._stall_seconds:g} s.") from None
        self._bytes += len(message.get("body") or b"")
        if self._bytes > self._limit_bytes:
            raise _too_large(self._limit_bytes)
        self.unread = message["type"] == "http.request" and message.get("more_body", False)
        return message


async def drain_body(receive: Receive) -> None:
    """Read and drop the rest of a body, for up to about `DRAIN_BYTES` and `DRAIN_SECONDS`.

    If the server closed the connection while the client is still sending, TCP would reset the connection and the client
    might lose the answer.
    """
    drained = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while drained <= DRAIN_BYTES:
                message = await receive()
                drained += len(message.get("body") or b"")
                if not message.get("more_body", False):
                    return


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body as one message, then the messages from the server."""
    first = True

    async def receive_again() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return receive_again


def _check_length(headers: Headers, limit_bytes: int) -> None:
    for length in values(headers, b"content-length"):
        if length.isdigit() and (len(length) > LENGTH_DIGITS or int(length) > limit_bytes):
            raise _too_large(limit_bytes)


def _too_slow(message: str) -> ApiError:
    return ApiError(408, message, type="invalid_request_error", code="body_timeout")


def _too_large(limit_bytes: int) -> ApiError:
    message = f"The body exceeds the limit of {limit_bytes} bytes."
    return ApiError(413, message, type="invalid_request_error", code="body_too_large")

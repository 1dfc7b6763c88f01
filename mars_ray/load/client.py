"""Send one request to an OpenAI-compatible endpoint and read its answer; whatever happens on the way is an outcome.

Nothing is tried again, and nothing is decoded that need not be: the client shares its machine with the server.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from mars_ray.load.record import PlannedRequest, RequestOutcome
from mars_ray.load.reply import ReplyRecorder
from mars_ray.load.sse import SseParser

TIMEOUT_S = 300.0
KEEP_ALIVE_S = 4.0
"""Less than the 5 s of uvicorn and others, so that no request is sent on a connection that is just being closed."""
DRAIN_S_MAX = 1.0
"""How long to wait for the end of a body behind the end of its answer; a connection read to its end is used again."""
BODY_BYTES_MAX, ERROR_BYTES_MAX = 64 << 20, 64 << 10
RESERVED = ("model", "messages", "max_tokens", "stream", "stream_options")
"""Fields of a request that the load sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and what all of them have in common."""

    url: str
    """The URL without /v1."""
    model: str
    api_key: str | None = field(default=None, repr=False)
    stream: bool = True
    timeout_s: float = TIMEOUT_S
    """Seconds for a whole request, from when it is sent."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def payload(self, request: PlannedRequest) -> bytes:
        """Return the JSON of a request."""
        body = {"model": self.model, "messages": request.messages, "max_tokens": request.max_tokens}
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {"stream": False}
        return json.dumps({**self.extra_body, **body, **streaming}).encode()


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Return a session to send requests in; whoever opens it closes it. Callers bound how many they send at once."""
    headers = {"Accept-Encoding": "identity"}  # compression would hold chunks back
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def ask(
    session: aiohttp.ClientSession, target: Target, payload: bytes, seen: ReplyRecorder, now: Callable[[], float]
) -> None:
    """Send the JSON of a request and note in `seen` what came of it."""
    url, headers = f"{target.url}/v1/chat/completions", {"Content-Type": "application/json"}
    try:
        async with asyncio.timeout(target.timeout_s), session.post(url, data=payload, headers=headers) as response:
            seen.http_status = response.status
            if not 200 <= response.status < 300:
                seen.refused(response.headers, await read_text(response, ERROR_BYTES_MAX), now())
            elif target.stream and response.content_type != "application/json":
                await _read_events(response, seen, now)
            else:
                seen.body(await read_text(response, BODY_BYTES_MAX), now())
    except TimeoutError:
        seen.end(RequestOutcome.TIMEOUT, now(), f"it had not ended {target.timeout_s:g} s after it was sent")
    except (aiohttp.ClientError, OSError) as error:
        begun = seen.http_status is not None
        seen.end(
            RequestOutcome.BROKEN if begun else RequestOutcome.CONNECTION, now(), f"{type(error).__name__}: {error}"
        )
    except ValueError as error:
        seen.end(RequestOutcome.BROKEN, now(), f"the answer is no chat completion: {error}")


async def read_text(response: aiohttp.ClientResponse, bytes_max: int) -> str:
    """Return the body, or what of it is within the limit."""
    received = b""
    while len(received) < bytes_max and (part := await response.content.read(bytes_max - len(received))):
        received += part
    return received.decode(errors="replace")


async def _read_events(response: aiohttp.ClientResponse, seen: ReplyRecorder, now: Callable[[], float]) -> None:
    parser = SseParser()
    async for received in response.content.iter_any():
        now_s = now()
        for data in parser.feed(received):
            seen.event(data, now_s)
        if seen.ended:
            break
    else:
        seen.stream_ended(now())
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S_MAX):
            while await response.content.readany():
                pass

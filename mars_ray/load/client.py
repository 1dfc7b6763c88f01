"""HTTP client of the load generator: find the model of an OpenAI-compatible endpoint, send a request, record the reply.

Requests are never retried. The client parses as little as possible, because it often shares a machine with the server.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from mars_ray.errors import ConfigError, RunError
from mars_ray.load.record import PlannedRequest, RequestOutcome
from mars_ray.load.reply import ReplyRecorder, SseParser, one_line

TIMEOUT_S = 300.0
PROBE_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 4.0
"""Seconds after which an idle connection is closed: less than uvicorn's 5 s, so that no request is sent on a connection
that the server is closing."""
DRAIN_S_MAX = 1.0
"""Maximum seconds to wait for the end of a body after its last event, so that the connection can be reused."""
BODY_BYTES_MAX = 64 << 20
ERROR_BYTES_MAX = 64 << 10
RESERVED = ("model", "messages", "max_tokens", "stream", "stream_options")
"""Request fields that the load generator sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The endpoint, and the settings that all requests share."""

    url: str
    """The URL without /v1."""
    model: str
    api_key: str | None = field(default=None, repr=False)
    stream: bool = True
    timeout_s: float = TIMEOUT_S
    """Time limit in seconds, from sending a request to the end of its reply."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def payload(self, request: PlannedRequest) -> bytes:
        """Return the body of a request as JSON."""
        body = {"model": self.model, "messages": request.messages, "max_tokens": request.max_tokens}
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {"stream": False}
        return json.dumps({**self.extra_body, **body, **streaming}).encode()


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Return a session without a connection limit. The caller closes it."""
    headers = {"Accept-Encoding": "identity"}  # compression would delay chunks
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def parse_url(text: str) -> str:
    """Return the URL without /v1 and without a trailing slash. Raises `ConfigError` for an unusable URL."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConfigError(f"url is {text!r}; give one such as http://127.0.0.1:8000.") from None
    if parts.username or parts.password:
        raise ConfigError("url holds a user or a password, which reports would show; give a key with --api-key.")
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"url is {text!r}; give one such as http://127.0.0.1:8000.")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of the endpoint."""

    name: str
    notice: str
    """Sentence of a mars-ray endpoint that goes with all its figures; usually empty."""


async def find_model(url: str, api_key: str | None, model: str | None) -> ListedModel:
    """Return the model called `model`, which need not be listed. None means the first model that the endpoint lists.

    Raises `RunError` if the endpoint is unreachable or lists no model.
    """
    try:
        async with (
            open_session(api_key) as session,
            asyncio.timeout(PROBE_TIMEOUT_S),
            session.get(f"{url}/v1/models") as response,
        ):
            body = await read_text(response, BODY_BYTES_MAX)
    except TimeoutError:
        raise RunError(
            f"{url} did not answer within {PROBE_TIMEOUT_S:g} s. Wait until the server is up, or check --url."
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise RunError(f"{url} cannot be reached ({error}). Start the server, or check --url.") from None
    listed = _listed(body)
    name = model or next((entry.name for entry in listed), None)
    if name is None:
        raise RunError(
            f"{url}/v1/models answered HTTP {response.status} and lists no model. Give --model or --api-key."
        )
    return next((entry for entry in listed if entry.name == name), ListedModel(name, ""))


def _listed(body: str) -> list[ListedModel]:
    """Return the models in a model list, or no models if `body` is not a model list."""
    try:
        entries = json.loads(body)["data"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
    return [
        ListedModel(entry["id"], one_line(str(entry.get("notice") or "")) or "")
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]


async def ask(
    session: aiohttp.ClientSession, target: Target, payload: bytes, reply: ReplyRecorder, now: Callable[[], float]
) -> None:
    """Send a request and record its reply, or the error, in `reply`."""
    url = f"{target.url}/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    try:
        async with asyncio.timeout(target.timeout_s), session.post(url, data=payload, headers=headers) as response:
            reply.http_status = response.status
            if not 200 <= response.status < 300:
                reply.refused(response.headers, await read_text(response, ERROR_BYTES_MAX), now())
            elif target.stream and response.content_type != "application/json":
                await _read_events(response, reply, now)
            else:
                reply.body(await read_text(response, BODY_BYTES_MAX), now())
    except TimeoutError:
        reply.end(RequestOutcome.TIMEOUT, now(), f"no end of the reply within {target.timeout_s:g} s")
    except (aiohttp.ClientError, OSError) as error:
        outcome = RequestOutcome.CONNECTION if reply.http_status is None else RequestOutcome.BROKEN
        reply.end(outcome, now(), f"{type(error).__name__}: {error}")
    except ValueError as error:
        reply.end(RequestOutcome.BROKEN, now(), f"the answer is not a chat completion: {error}")


async def read_text(response: aiohttp.ClientResponse, bytes_max: int) -> str:
    """Return the body as text, truncated after `bytes_max` bytes."""
    received = b""
    while len(received) < bytes_max and (part := await response.content.read(bytes_max - len(received))):
        received += part
    return received.decode(errors="replace")


async def _read_events(response: aiohttp.ClientResponse, reply: ReplyRecorder, now: Callable[[], float]) -> None:
    parser = SseParser()
    async for received in response.content.iter_any():
        now_s = now()
        for data in parser.feed(received):
            reply.event(data, now_s)
        if reply.ended:
            break
    else:
        reply.stream_ended(now())
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S_MAX):
            while await response.content.readany():
                pass

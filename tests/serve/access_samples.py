"""An app behind the access middleware, callers that send it messages, and the keys they have."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import uvicorn

from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.serve.middleware.access import AccessMiddleware
from mars_ray.serve.middleware.callers import Callers, KeyCallers
from mars_ray.serve.middleware.key_store import LiveKeys
from mars_ray.serve.middleware.scope import OPEN_PATHS

HOST = (b"host", b"localhost:8000")
JSON = {b"content-type": b"application/json", b"x-content-type-options": b"nosniff", b"cache-control": b"no-store"}
OK_START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
OK_BODY = {"type": "http.response.body", "body": b"ok"}

App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass
class KnownKeys:
    """What keys the tests know, and the store that holds them."""

    live: LiveKeys
    use: str
    operate: str
    other: str


@dataclass
class Inner:
    """The app behind the middleware: remembers what reached it, and then does `then`."""

    then: App | None = None
    scopes: list[Any] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        message = await receive()
        assert (message["type"], message["more_body"]) == ("http.request", False)
        self.bodies.append(message["body"])
        if self.then:
            await self.then(scope, receive, send)
        else:
            await send(OK_START)
            await send(OK_BODY)


@dataclass
class Client:
    """Sends messages, then nothing more; keeps what comes back."""

    messages: list[dict[str, Any]]
    received: list[Any] = field(default_factory=list)
    reads: int = 0
    reads_before_answer: int = 0

    async def receive(self) -> dict[str, Any]:
        self.reads += 1
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def send(self, message: Any) -> None:
        if not self.received:
            self.reads_before_answer = self.reads
        self.received.append(message)

    @property
    def status(self) -> int:
        return self.received[0]["status"]  # type: ignore[no-any-return]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.received[0]["headers"])

    @property
    def error(self) -> dict[str, str | None]:
        assert JSON.items() <= self.headers.items()
        body = b"".join(message["body"] for message in self.received[1:])
        assert self.headers[b"content-length"] == str(len(body)).encode()
        told = json.loads(body)
        assert told.keys() == {"error"}
        assert told["error"].keys() == {"message", "type", "param", "code"}
        return told["error"]  # type: ignore[no-any-return]


def scope_of(path: str, headers: Sequence[tuple[bytes, bytes]] = (), **more: Any) -> dict[str, Any]:
    """As a server builds it from the path on the request line."""
    scope = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": list(headers),
    }
    return scope | more


def bearer(key: str) -> tuple[bytes, bytes]:
    return (b"authorization", b"Bearer " + key.encode())


def access(
    inner: Any,
    keys: KnownKeys | None = None,
    retry_after_s: int = 1,
    pages: frozenset[str] = frozenset(),
    callers: Callers | None = None,
    **limits: Any,
) -> AccessMiddleware:
    return AccessMiddleware(
        inner,
        callers=KeyCallers(keys.live) if keys else callers,
        limits=RequestLimits(**limits),
        allowed_hosts=frozenset({"localhost"}),
        retry_after_s=lambda: retry_after_s,
        observe=lambda exchange: None,
        open_paths=OPEN_PATHS | pages,
        new_id=lambda: "made-here",
    )


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """Run an app on a port, started as Ray Serve starts it, which names no protocol. Yields the port."""
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", loop="asyncio")
    server = uvicorn.Server(config)
    server.config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        await server.shutdown()


def call(app: AccessMiddleware, scope: dict[str, Any], *parts: bytes | None) -> Client:
    """Make one request; None among the parts of the body is a client that leaves. Ends within a minute or fails."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        if part is not None
        else {"type": "http.disconnect"}
        for number, part in enumerate(parts or (b"",))
    ]
    client = Client(messages)
    asyncio.run(asyncio.wait_for(app(scope, client.receive, client.send), 60))
    return client

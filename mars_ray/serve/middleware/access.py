"""Access control in front of the app: host, key, role, requests in flight, size of the body. Plain ASGI middleware.

In:    HTTP requests from unknown callers.
Out:   for requests that have a known key and keep within the limits: a call of the inner app, with the body already
       read; for all others: an error in OpenAI's format. The app gets a request's `Exchange` from `Exchange.of(scope)`.
Never: passes a request without a key to a path that needs one, keeps a body before the caller is known and admitted, or
       shows internal errors to a caller.

Starlette's middleware is not used because the order of the checks matters (from cheap to expensive, the key before the
body), and each check has to answer with OpenAI's error and leave a record.
"""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.engine.service_class import STANDARD
from mars_ray.errors import MarsRayError
from mars_ray.openai_api.api_error import ApiError, api_error, internal_error
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.serve.middleware.admission import Admission
from mars_ray.serve.middleware.allowed_hosts import AllowedHosts
from mars_ray.serve.middleware.api_form import OPENAI, ApiForm, Uploads
from mars_ray.serve.middleware.api_keys import role_allows
from mars_ray.serve.middleware.body import BodyStream, drain_body, has_body, read_body, replay_body
from mars_ray.serve.middleware.callers import Caller, Callers, unauthorized
from mars_ray.serve.middleware.exchange import Exchange, trace_id_of
from mars_ray.serve.middleware.scope import (
    OPEN_PATHS,
    TOKENIZER_PATHS,
    Headers,
    head_bytes,
    headers_of,
    is_open,
    role_of_path,
    routed_path,
    values,
)

log = logging.getLogger(__name__)

ANONYMOUS = "anonymous"
"""Name of every caller of a server without keys. Such a server listens on the loopback interface only."""

FORM_BYTES = 64 * 2**10
"""Maximum bytes of an upload besides its file: other fields of the form, and boundaries."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_BEARER = re.compile(rb"bearer +([A-Za-z0-9._~+/=-]+)", re.IGNORECASE)


class AccessMiddleware:
    """Access control around `app`. It must be the outermost layer, because layers around it are not protected."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        callers: Callers | None,
        default_class: str = STANDARD,
        limits: RequestLimits,
        api_of: Callable[[str], ApiForm] = lambda _path: OPENAI,
        tokenizer_paths: frozenset[str] = TOKENIZER_PATHS,
        uploads: Uploads | None = None,
        allowed_hosts: frozenset[str],
        retry_after_s: Callable[[], int],
        observe: Callable[[Exchange], None],
        identified: Callable[[Exchange, Headers], None] | None = None,
        open_paths: frozenset[str] = OPEN_PATHS,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        running: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._app = app
        self.running = running
        """Runs what the app needs within a block, for a server that sends no lifespan events."""
        self._callers = callers
        self._default_class = default_class
        self._limits = limits
        self._api_of = api_of
        self._tokenizer_paths = tokenizer_paths
        self._uploads = uploads
        self._observe = observe
        self._identified = identified
        self._open_paths = open_paths
        self._new_id = new_id
        self._hosts = AllowedHosts(allowed_hosts)
        self.admission = Admission(limits, retry_after_s, has_keys=callers is not None)
        """The requests in flight, for metrics and for code that waits until they end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._app(scope, receive, send)
            case "websocket":  # not supported by any route; closing before accepting answers 403
                await send({"type": "websocket.close", "code": 1008})
            case kind:
                raise ValueError(f"unknown ASGI scope {kind!r}")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        path = routed_path(scope)
        exchange = Exchange(
            request_id=self._request_id(headers),
            method=scope["method"],
            path=path,
            api=self._api_of(path),
            arrived_unix_s=time.time(),
            trace_id=trace_id_of(headers),
        )
        response = _Response(send, exchange, unread=has_body(headers))
        try:
            await self._admit(scope, headers, exchange, receive, response)
        except Exception as error:
            if response.started:
                log.exception("request %s failed after its response had begun", exchange.request_id)
                raise  # makes the server close the connection, so that the caller notices the incomplete answer
            refusal = self._refusal(error, exchange.request_id)
            if refusal.status >= 500 and refusal is not error:
                log.exception("request %s failed", exchange.request_id)
            await response.refuse(refusal)
        finally:
            exchange.seconds = response.seconds()
            self._observe(exchange)
        await response.finish(receive)

    async def _admit(
        self, scope: Scope, headers: Headers, exchange: Exchange, receive: Receive, response: "_Response"
    ) -> None:
        """Run the checks from cheap to expensive, then the app. Raises an `ApiError` for a refused request."""
        if head_bytes(scope) > self._limits.header_bytes:
            message = f"Path, query and headers exceed the limit of {self._limits.header_bytes} bytes."
            raise ApiError(431, message, type="invalid_request_error", code="headers_too_large")
        inner_scope = exchange.put_in(scope)
        needs_no_key = is_open(scope, self._open_paths)
        page = needs_no_key and exchange.path not in OPEN_PATHS
        self._hosts.check(headers, page=page)
        if needs_no_key:
            # Refuse a body, because the caller is unknown and a body costs memory. Pages count towards a limit; health
            # probes do not.
            with self.admission.admit_page() if page else nullcontext():
                await self._run(inner_scope, headers, receive, response, body_bytes=0)
            return
        role = role_of_path(exchange.path)
        if self._callers is None:
            exchange.key = ANONYMOUS
            exchange.service_class = self._default_class
        else:
            caller = await self._caller(self._callers, headers, exchange.api.key_header)
            exchange.caller = caller
            exchange.key = caller.key
            exchange.owner = caller.owner
            exchange.service_class = caller.service_class or self._default_class
            if not role_allows(caller.role, role):
                message = "This path needs a key with the role operate."
                raise ApiError(403, message, type="permission_error", code="role_not_sufficient")
        if self._identified:
            self._identified(exchange, headers)
        tokenizing = exchange.path in self._tokenizer_paths
        if self._uploads and exchange.path == self._uploads.path and exchange.method == "POST":
            with (
                self.admission.admit(exchange.key, role),
                self.admission.admit_further("uploads", exchange.key, self._uploads.at_once),
            ):
                await self._stream(inner_scope, headers, receive, response, self._uploads.max_bytes)
            return
        with (
            self.admission.admit(exchange.key, role),
            self.admission.admit_further("tokenizer requests", exchange.key, self._limits.tokenize_per_key)
            if tokenizing
            else nullcontext(),
        ):
            await self._run(inner_scope, headers, receive, response, body_bytes=self._limits.body_bytes)

    async def _caller(self, callers: Callers, headers: Headers, key_header: bytes | None) -> Caller:
        """Return the caller. Raises an `ApiError` if the caller has no access."""
        credentials = values(headers, b"authorization")
        if key_header and not credentials:
            credentials = [b"Bearer " + key for key in values(headers, key_header)]
        token = _BEARER.fullmatch(credentials[0]) if len(credentials) == 1 else None
        caller = await callers.identify(token[1].decode("ascii")) if token else None
        if caller is None:
            message = (
                "Send a valid API key in one header: Authorization: Bearer <key>"
                f"{f' or {key_header.decode()}: <key>' if key_header else ''}."
            )
            raise unauthorized(message, "invalid_api_key")
        return caller

    async def _run(
        self, scope: Scope, headers: Headers, receive: Receive, response: "_Response", *, body_bytes: int
    ) -> None:
        response.unread = True
        body = await read_body(headers, receive, limit_bytes=body_bytes, seconds=self._limits.body_seconds)
        response.unread = False
        if body is not None:  # None: the client has disconnected, so nobody would read an answer
            await self._app(scope, replay_body(body, receive), response.send)

    async def _stream(
        self, scope: Scope, headers: Headers, receive: Receive, response: "_Response", file_bytes: int
    ) -> None:
        """Run the app on a body that it reads while the body arrives."""
        response.unread = True
        limit_bytes = file_bytes + FORM_BYTES
        body = BodyStream(headers, receive, limit_bytes=limit_bytes, stall_seconds=self._limits.body_seconds)
        await self._app(scope, body.receive, response.send_while(lambda: body.unread))

    def _request_id(self, headers: Headers) -> str:
        ids = values(headers, b"x-request-id")
        valid = len(ids) == 1 and _REQUEST_ID.fullmatch(ids[0])
        return ids[0].decode("ascii") if valid else self._new_id()

    def _refusal(self, error: Exception, request_id: str) -> ApiError:
        match error:
            case ApiError():
                return error
            case MarsRayError():
                return api_error(error, request_id=request_id, retry_after_s=self.admission.retry_after_s())
            case _:
                return internal_error(request_id)


class _Response:
    """The response on its way out. Tracks whether it has started, and adds our headers."""

    def __init__(self, send: Send, exchange: Exchange, *, unread: bool) -> None:
        self._send = send
        self._exchange = exchange
        self._began_s = time.perf_counter()
        self._unfinished = False
        self.unread = unread
        """Whether a part of the body may still arrive. If so, the connection closes after the response."""
        self._headers = [
            (b"x-request-id", exchange.request_id.encode("ascii")),
            (b"x-content-type-options", b"nosniff"),
            (b"cache-control", b"no-store"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]
        if exchange.api.id_header:
            self._headers.append((exchange.api.id_header, exchange.request_id.encode("ascii")))

    @property
    def started(self) -> bool:
        """Whether the status has been sent."""
        return self._exchange.status is not None

    def seconds(self) -> float:
        """Return the seconds since the request arrived."""
        return time.perf_counter() - self._began_s

    async def send(self, message: Message) -> None:
        """Pass on a message of the app; our headers replace the app's headers of the same name."""
        if message["type"] == "http.response.start":
            self._exchange.status = message["status"]
            self._exchange.headers_s = self.seconds()
            left = self._exchange.headers.items()
            ours = self._headers + [(name.encode("ascii"), value.encode("ascii")) for name, value in left]
            names = {name for name, _ in ours}
            kept = [(name, value) for name, value in message.get("headers", ()) if bytes(name).lower() not in names]
            closing = [(b"connection", b"close")] if self.unread else []
            message = {**message, "headers": kept + ours + closing}
        await self._send(message)

    def send_while(self, unread: Callable[[], bool]) -> Send:
        """Return a `send` for an app that reads the body itself; `unread` tells whether it has read all of it."""

        async def send(message: Message) -> None:
            self.unread = unread()
            await self.send(message)

        return send

    async def refuse(self, error: ApiError) -> None:
        """Send an error as the response. Call `finish` afterwards."""
        self._exchange.code = error.code
        exchange = self._exchange
        body = json.dumps(exchange.api.body(error, exchange.request_id)).encode()
        headers = [(name.encode("ascii"), value.encode("ascii")) for name, value in error.headers.items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        self._unfinished = self.unread and error.status != 408  # a client that was too slow gets no more time
        await self.send({"type": "http.response.body", "body": body, "more_body": self._unfinished})

    async def finish(self, receive: Receive) -> None:
        """End a refusal: drop the rest of the client's body, after which the server closes the connection."""
        if self._unfinished:
            await drain_body(receive)
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

"""Access control in front of the app: host, key, role, requests in flight, size of the body. Plain ASGI middleware.

In:    HTTP requests of strangers.
Out:   requests of known keys within the limits, with their body read, for the app inside; an error in OpenAI's form for
       all others; an `Exchange` for each, which the app finds with `Exchange.of(scope)`.
Never: lets a request without a key past an open path, keeps a body before the caller is known and admitted, or shows
       a caller what went wrong inside.

Ours and not Starlette's middleware: the order of the checks is the point (from cheap to dear, the key before the body),
and each of them has to answer with OpenAI's error and leave a record.
"""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.engine.service_class import STANDARD
from mars_ray.errors import MarsRayError
from mars_ray.openai_api.api_error import ApiError, api_error, internal_error
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.serve.middleware.admission import Admission
from mars_ray.serve.middleware.allowed_hosts import AllowedHosts
from mars_ray.serve.middleware.api_keys import KeyFile, Role, role_allows
from mars_ray.serve.middleware.body import drain_body, has_body, read_body, replay_body
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
"""Every caller of a server without keys; such a server listens on the loopback interface only."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_BEARER = re.compile(rb"bearer +([A-Za-z0-9._~+/=-]+)", re.IGNORECASE)


class AccessMiddleware:
    """Wraps `app`. It must be the outermost layer: what is added around it is not protected."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyFile | None,
        default_class: str = STANDARD,
        limits: RequestLimits,
        allowed_hosts: frozenset[str],
        retry_after_s: Callable[[], int],
        observe: Callable[[Exchange], None],
        open_paths: frozenset[str] = OPEN_PATHS,
        role_of: Callable[[str], Role] = role_of_path,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._app, self._keys, self._limits, self._open_paths = app, keys, limits, open_paths
        self._default_class = default_class
        self._role_of, self._new_id, self._observe = role_of, new_id, observe
        self._hosts = AllowedHosts(allowed_hosts)
        self.admission = Admission(limits, retry_after_s)
        """What is in flight, for metrics and for those who wait for it to end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._app(scope, receive, send)
            case "websocket":  # Nothing inside speaks it. Closed before it is accepted, it is a 403.
                await send({"type": "websocket.close", "code": 1008})
            case other:
                raise ValueError(f"unknown ASGI scope {other!r}")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        exchange = Exchange(
            request_id=self._request_id(headers),
            method=scope["method"],
            path=routed_path(scope),
            arrived_unix_s=time.time(),
            trace_id=trace_id_of(headers),
        )
        response = _Response(send, exchange, unread=has_body(headers))
        try:
            await self._admit(scope, headers, exchange, receive, response)
        except Exception as error:
            if response.started:
                log.exception("request %s failed after its response had begun", exchange.request_id)
                raise  # the server breaks the connection off: the caller must not take half an answer for a whole
            refusal = self._refusal(error, exchange.request_id)
            if refusal.status >= 500:
                log.exception("request %s failed", exchange.request_id)
            await response.refuse(refusal)
        finally:
            exchange.seconds = response.seconds()
            self._observe(exchange)
        await response.finish(receive)

    async def _admit(
        self, scope: Scope, headers: Headers, exchange: Exchange, receive: Receive, response: "_Response"
    ) -> None:
        """Check from cheap to dear, then run the app. Raises an `ApiError` for what is refused."""
        if head_bytes(scope) > self._limits.header_bytes:
            message = f"Path, query and headers are larger than {self._limits.header_bytes} bytes, the most taken here."
            raise ApiError(431, message, type="invalid_request_error", code="headers_too_large")
        inside, needs_no_key = exchange.put_in(scope), is_open(scope, self._open_paths)
        page = needs_no_key and exchange.path not in OPEN_PATHS
        self._hosts.check(headers, page=page)
        if needs_no_key:
            # Nobody is known here, so there is no body: it would cost memory. Probes of health are not even counted.
            with self.admission.admit_page() if page else nullcontext():
                await self._run(inside, headers, receive, response, body_bytes=0)
            return
        exchange.key, exchange.service_class = self._caller(headers, exchange.path)
        role, has_key = self._role_of(exchange.path), self._keys is not None
        tokenizing = exchange.path in TOKENIZER_PATHS
        with (
            self.admission.admit(exchange.key, role, has_key=has_key),
            self.admission.admit_tokenizing(exchange.key, has_key=has_key) if tokenizing else nullcontext(),
        ):
            await self._run(inside, headers, receive, response, body_bytes=self._limits.body_bytes)

    def _caller(self, headers: Headers, path: str) -> tuple[str, str]:
        """Return name and class of the caller's key. Raises an `ApiError` for callers who may not come in."""
        if self._keys is None:
            return ANONYMOUS, self._default_class
        sent = values(headers, b"authorization")
        token = _BEARER.fullmatch(sent[0]) if len(sent) == 1 else None
        key = self._keys.find(token[1].decode("ascii")) if token else None
        if key is None:
            raise ApiError(
                401,
                "Send a valid API key in one header: Authorization: Bearer <key>.",
                type="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if not role_allows(key.role, self._role_of(path)):
            message = "This path needs a key of the role operate."
            raise ApiError(403, message, type="permission_error", code="role_not_sufficient")
        return key.name, key.service_class or self._default_class

    async def _run(
        self, scope: Scope, headers: Headers, receive: Receive, response: "_Response", *, body_bytes: int
    ) -> None:
        response.unread = True
        body = await read_body(headers, receive, limit_bytes=body_bytes, seconds=self._limits.body_seconds)
        response.unread = False
        if body is not None:  # else the client has left, and nobody would read an answer
            await self._app(scope, replay_body(body, receive), response.send)

    def _request_id(self, headers: Headers) -> str:
        sent = values(headers, b"x-request-id")
        sane = len(sent) == 1 and _REQUEST_ID.fullmatch(sent[0])
        return sent[0].decode("ascii") if sane else self._new_id()

    def _refusal(self, error: Exception, request_id: str) -> ApiError:
        match error:
            case ApiError():
                return error
            case MarsRayError():
                return api_error(error, request_id=request_id, retry_after_s=self.admission.retry_after_s())
            case _:
                return internal_error(request_id)


class _Response:
    """The answer on its way out: knows whether it began, and puts our headers on it."""

    def __init__(self, send: Send, exchange: Exchange, *, unread: bool) -> None:
        self._send, self._exchange, self._began_s = send, exchange, time.perf_counter()
        self._unfinished = False
        self.unread = unread
        """A body is still on its way. Then the connection ends with the answer, or it could go on trickling in."""
        self._headers = [
            (b"x-request-id", exchange.request_id.encode("ascii")),
            (b"x-content-type-options", b"nosniff"),
            (b"cache-control", b"no-store"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]

    @property
    def started(self) -> bool:
        """Whether the status has left."""
        return self._exchange.status is not None

    def seconds(self) -> float:
        """Return the seconds since the request arrived."""
        return time.perf_counter() - self._began_s

    async def send(self, message: Message) -> None:
        """Pass a message of the app on; for the headers named above, ours are the only ones."""
        if message["type"] == "http.response.start":
            self._exchange.status, self._exchange.headers_s = message["status"], self.seconds()
            ours = {name for name, _ in self._headers}
            theirs = [(name, value) for name, value in message.get("headers", ()) if bytes(name).lower() not in ours]
            closing = [(b"connection", b"close")] if self.unread else []
            message = {**message, "headers": theirs + self._headers + closing}
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error and nothing else. Call `finish` afterwards."""
        self._exchange.code = error.code
        body = json.dumps(error.body()).encode()
        headers = [(name.encode("ascii"), value.encode("ascii")) for name, value in error.headers.items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        self._unfinished = self.unread and error.status != 408  # a client that was too slow once gets no more time
        await self.send({"type": "http.response.body", "body": body, "more_body": self._unfinished})

    async def finish(self, receive: Receive) -> None:
        """End a refusal whose body the client may still be sending: the server closes the connection at the end."""
        if self._unfinished:
            await drain_body(receive)
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

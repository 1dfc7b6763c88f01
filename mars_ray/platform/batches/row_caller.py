"""Call the routes of the endpoint in this process, for the rows of batches.

In:    a body, the batch that it belongs to.
Out:   the answer that a caller with the key of the batch would get: the same checks, templates, limits and errors.
Never: counts the usage of a row twice.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from starlette.types import Message

from mars_ray.platform.accounts.callers import AccountCallers
from mars_ray.platform.api_forms import api_of
from mars_ray.platform.batches.batch_store import StoredBatch
from mars_ray.platform.batches.row_calls import RouteAnswer
from mars_ray.platform.models.served_models import ServedModels
from mars_ray.platform.responses.response_store import ResponseStoreClient
from mars_ray.platform.responses.routes import responses_routes
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.serve.http.error_answers import add_error_handlers
from mars_ray.serve.http.routes import STREAM, openai_routes
from mars_ray.serve.middleware.exchange import Exchange


class RowCaller:
    """Calls the routes of `models` in the class of service `service_class`.

    `observe` gets the exchange of each call, for the log. A row beyond a limit of its key or account is refused,
    and its batch pauses.
    """

    def __init__(
        self,
        models: ServedModels,
        store: ResponseStoreClient,
        service_class: str,
        callers: AccountCallers,
        meter: GatewayMeter | None,
        observe: Callable[[Exchange], None],
    ) -> None:
        self._app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        add_error_handlers(self._app, lambda: 1)
        self._app.include_router(openai_routes(models))
        self._app.include_router(responses_routes(models, store, STREAM))
        self._meter = meter
        self._service_class = service_class
        self._observe = observe
        self._callers = callers

    async def has_access(self, batch: StoredBatch) -> bool:
        """Return whether the key of a batch is still valid."""
        return await self._callers.has_access(batch.key, batch.owner)

    async def call(self, batch: StoredBatch, body: dict[str, Any], id: str) -> RouteAnswer:
        """Return the answer of the route to a body, see `RouteCaller`."""
        url = batch.request.endpoint
        exchange = Exchange(
            request_id=uuid4().hex,
            method="POST",
            path=url,
            arrived_unix_s=time.time(),
            key=batch.key,
            owner=batch.owner,
            caller=await self._callers.row_caller(batch.key, batch.owner),
            api=api_of(url),
            meter_id=id,
            service_class=self._service_class,
        )
        began_s = time.perf_counter()
        request = _AsgiCall(json.dumps(body).encode())
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "server": None,
            "client": None,
        }
        try:
            await self._app(exchange.put_in(scope), request.receive, request.send)
        except Exception:
            if request.status is None:  # Starlette raises an unexpected error again after it has answered
                raise
        finally:
            exchange.status = request.status
            exchange.seconds = time.perf_counter() - began_s
            if self._meter:
                self._meter.forget(exchange)
            self._observe(exchange)
        body_sent = json.loads(bytes(request.answer) or b"{}")
        return RouteAnswer(request.status or 500, body_sent, exchange.request_id, request.retry_after_s)


class _AsgiCall:
    """One request to an ASGI app: its body, and the answer. The caller never disconnects."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status: int | None = None
        self.retry_after_s: float | None = None
        self.answer = bytearray()

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()  # until cancelled
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            after = dict(message.get("headers", ())).get(b"retry-after")
            self.retry_after_s = None if after is None else float(after)
        else:
            self.answer += message.get("body", b"")

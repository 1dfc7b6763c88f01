"""Call the routes of the endpoint in this process, for the rows of batches.

In:    a body, the batch that it belongs to.
Out:   the answer that a caller with the key of the batch would get: the same checks, templates, limits and errors; a
       runner whose rows are answered in this way.
Never: counts the usage of a row twice.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from starlette.types import Message

from mars_ray.control.cluster_load import Backlog
from mars_ray.engine.service_class import BATCH_CLASS
from mars_ray.platform.accounts.account_store import open_account_store
from mars_ray.platform.accounts.callers import AccountCallers
from mars_ray.platform.batches.batch_run import POLL_S, BatchTools
from mars_ray.platform.batches.batch_store import StoredBatch, Stores
from mars_ray.platform.batches.row_calls import RouteAnswer, RowCalls
from mars_ray.platform.batches.runner import BatchRunner
from mars_ray.platform.models.served_models import ServedModels
from mars_ray.platform.platform_config import PlatformConfig
from mars_ray.platform.responses.response_store import ResponseStoreClient
from mars_ray.platform.responses.routes import response_form, responses_routes
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.serve.http.error_answers import add_error_handlers
from mars_ray.serve.http.routes import openai_routes
from mars_ray.serve.middleware.exchange import Exchange, log_exchange
from mars_ray.serve.middleware.key_store import LiveKeys


class RowCaller:
    """Calls the routes of `models` in the class of service `service_class`. The log has a line for each call."""

    def __init__(
        self,
        models: ServedModels,
        store: ResponseStoreClient,
        service_class: str,
        callers: AccountCallers,
        meter: GatewayMeter | None,
    ) -> None:
        self._models = models
        self._app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        add_error_handlers(self._app, lambda: 1)
        self._app.include_router(openai_routes(models))
        self._app.include_router(responses_routes(models, store))
        self._meter = meter
        self._service_class = service_class
        self._callers = callers

    def model_of(self, name: str | None) -> str:
        """Return the name of the model that answers requests for a model or adapter."""
        return self._models.model_of(name)

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
            api=response_form(url),
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
            log_exchange(exchange)
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


def make_batch_runner(
    models: ServedModels,
    responses: ResponseStoreClient,
    stores: Stores,
    config: PlatformConfig,
    *,
    meter: GatewayMeter | None = None,
    report: Callable[[Mapping[str, Backlog]], Awaitable[None]] | None = None,
    poll_s: float = POLL_S,
) -> BatchRunner:
    """Return the runner of the batches in `stores`. The models must run as long as the runner does.

    Rows run in the class of service `batch`, or in the first class if the endpoint has none of this name.
    """
    classes = config.class_names
    service_class = BATCH_CLASS if BATCH_CLASS in classes else classes[0]
    keys = LiveKeys(open_account_store(config.keys, config.storage)) if config.keys else None
    tools = BatchTools(
        files=stores.files,
        batches=stores.batches,
        calls=RowCalls(RowCaller(models, responses, service_class, AccountCallers(keys), meter)),
        max_rows=config.storage_limits.rows,
        max_body_bytes=config.limits.body_bytes,
        poll_s=poll_s,
    )
    return BatchRunner(tools, report)

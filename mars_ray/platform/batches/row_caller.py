"""Call the routes of the endpoint in this process, for the rows of batches.

In:    a body, the batch that it belongs to.
Out:   the answer that a caller with the key of the batch would get: the same checks, templates, limits and errors; a
       runner whose rows are answered in this way.
Never: counts the usage of a row twice.
"""

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

import httpx2
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

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

log = logging.getLogger(__name__)


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

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await self._app(exchange.put_in(scope), receive, send)
            except Exception:  # Starlette raises an unexpected error again after it has answered
                log.exception("a row of batch %s failed", batch.id)
                raise

        # A client of this library would add what a row does not need, and take longer.
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        request = httpx2.Request(
            "POST", f"http://rows{url}", content=json.dumps(body), headers={"content-type": "application/json"}
        )
        try:
            answer = await transport.handle_async_request(request)
            exchange.status = answer.status_code
        finally:
            exchange.seconds = time.perf_counter() - began_s
            if self._meter:
                self._meter.forget(exchange)
            log_exchange(exchange)
        after = answer.headers.get("retry-after")
        content = json.loads(await answer.aread() or b"{}")
        return RouteAnswer(answer.status_code, content, exchange.request_id, None if after is None else float(after))


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

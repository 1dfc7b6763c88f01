"""The complete HTTP gateway as one ASGI app: access middleware, routes, log and metrics around an engine client.

In:    settings, the models with clients of their engines and controllers, an `Extension`.
Out:   one ASGI app for any ASGI server.
Never: imports Ray.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import TYPE_CHECKING

from mars_ray.control.core.status import ClusterStatus
from mars_ray.errors import UnavailableError
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.serve.http.extension import Extension
from mars_ray.serve.http.gateway_metrics import ROUTES, GatewayMetrics, merge_metrics
from mars_ray.serve.http.models import GatewayModels
from mars_ray.serve.http.routes import make_app
from mars_ray.serve.middleware.access import AccessMiddleware
from mars_ray.serve.middleware.admission import RetryAfter
from mars_ray.serve.middleware.callers import KeyCallers
from mars_ray.serve.middleware.exchange import Exchange, log_exchange
from mars_ray.serve.middleware.key_store import LiveKeys, open_key_file
from mars_ray.serve.middleware.scope import OPEN_PATHS, TOKENIZER_PATHS
from mars_ray.traces.trace_settings import traces_are_on
from mars_ray.web.pages import open_paths

if TYPE_CHECKING:
    from mars_ray.serve.http.request_spans import RequestSpans


class KeyFile(Extension):
    """Access with the keys in the file of `config`; without one, everybody has access."""

    def __init__(self, config: ServeConfig) -> None:
        """Read the keys. Raises `DataError` for a file that cannot be used."""
        if config.keys is not None:
            store = open_key_file(config.keys)
            self.callers = KeyCallers(LiveKeys(store, classes=config.class_names))


def make_gateway_app(
    models: GatewayModels, config: ServeConfig, *, name: str, extension: Extension | None = None
) -> AccessMiddleware:
    """Return the app. `name` identifies this process in the metrics. Raises `DataError` for bad keys.

    Without an `extension`, callers have simple keys.
    """
    extension = extension or KeyFile(config)
    routes = ROUTES | extension.measured_paths
    spans = open_spans(name, routes)
    gateway_metrics = GatewayMetrics(model=config.model_name, gateway=name, routes=routes)
    retry_after = RetryAfter()

    async def metrics(accept: str) -> tuple[bytes, str]:
        in_flight = sum(app.admission.in_flight.values())
        status, further = await asyncio.gather(status_for_prices(), extension.metrics())
        text = gateway_metrics.text(in_flight, status, spans.counts() if spans else {})
        engines = await asyncio.gather(*(endpoint.client.metrics() for endpoint in models.endpoints()))
        return merge_metrics([text, *further, *chain.from_iterable(engines)], accept)

    async def status_for_prices() -> ClusterStatus | None:
        """Return the state of the cluster; None if the replicas have no price, or if no controller answers."""
        try:
            return None if config.engine.replica_price is None else await models.control(None).status()
        except UnavailableError:
            return None

    def observe(exchange: Exchange) -> None:
        extension.meter.end(exchange)
        if spans:
            spans.end(exchange)
        gateway_metrics.observe(exchange)
        log_exchange(exchange)
        if exchange.usage and exchange.usage.tokens:  # a refusal takes no time
            retry_after.observe(exchange.seconds)

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        try:
            async with extension.running(), models.running():
                yield
        finally:
            await asyncio.to_thread(extension.audit.close)
            if spans:
                await asyncio.to_thread(spans.close)

    app = AccessMiddleware(
        make_app(models, metrics, extension, running=running, retry_after_s=retry_after.seconds, web=config.web),
        running=running,
        callers=extension.callers,
        default_class=config.classes[0].name,
        limits=config.limits,
        api_of=extension.api_of,
        tokenizer_paths=TOKENIZER_PATHS | extension.tokenizer_paths,
        uploads=extension.uploads,
        allowed_hosts=config.allowed_hosts,
        retry_after_s=retry_after.seconds,
        observe=observe,
        identified=spans.begin if spans else None,
        open_paths=OPEN_PATHS | open_paths() if config.web else OPEN_PATHS,
    )
    return app


def open_spans(gateway: str, routes: frozenset[str]) -> "RequestSpans | None":
    """Return the maker of a gateway's spans; None while traces are off.

    Raises `ConfigError` for environment variables that cannot be followed.
    """
    if not traces_are_on(os.environ):
        return None
    # The SDK takes 20 MB and a quarter of a second, so only traced gateways load it.
    from mars_ray.serve.http.request_spans import RequestSpans
    from mars_ray.traces.tracer import Tracer

    return RequestSpans(Tracer(os.environ, instance=gateway), routes)

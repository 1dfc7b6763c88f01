"""The complete HTTP gateway as one ASGI app: access middleware, routes, log and metrics around an engine client.

In:    settings, the models with clients of their engines and controllers, an `Extension`.
Out:   one ASGI app for any ASGI server.
Never: imports Ray.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from mars_ray.control.core.status import ClusterStatus
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.mode import Mode
from mars_ray.engine.service_class import BATCH_CLASS
from mars_ray.errors import UnavailableError
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.extension import Extension, Meter
from mars_ray.serve.http.gateway_metrics import ROUTES, GatewayMetrics, merge_metrics
from mars_ray.serve.http.models import GatewayModels
from mars_ray.serve.http.routes import make_app
from mars_ray.serve.http.tokenizer_process import TokenizerProcess
from mars_ray.serve.middleware.access import AccessMiddleware
from mars_ray.serve.middleware.admission import RetryAfter
from mars_ray.serve.middleware.callers import KeyCallers
from mars_ray.serve.middleware.exchange import Exchange, log_exchange
from mars_ray.serve.middleware.key_store import LiveKeys, open_key_file
from mars_ray.serve.middleware.scope import OPEN_PATHS, TOKENIZER_PATHS, Headers
from mars_ray.serve.replicas.engine_client import EngineClient
from mars_ray.traces.trace_settings import traces_are_on
from mars_ray.web.pages import open_paths


def make_endpoint(client: EngineClient, config: ServeConfig, folder: Path, meter: Meter | None = None) -> Endpoint:
    """Return the endpoint of the model in `folder`. Without a `meter`, it neither limits nor counts usage."""
    return Endpoint(
        config.model_name,
        client,
        TokenizerProcess(folder, tool_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser),
        config.limits,
        default_mode=Mode(config.mode),
        default_sampling=generation_defaults(folder),
        log_prompts=config.log_prompts,
        migration_limit=config.migration_limit,
        batch_class=BATCH_CLASS if BATCH_CLASS in config.class_names else None,
        meter=meter,
    )


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
    traces = open_traces(name, routes)
    gateway_metrics = GatewayMetrics(model=config.model_name, gateway=name, routes=routes)
    retry_after = RetryAfter()

    async def metrics(accept: str) -> tuple[bytes, str]:
        in_flight = sum(app.admission.in_flight.values())
        status, further = await asyncio.gather(status_for_prices(), extension.metrics())
        text = gateway_metrics.text(in_flight, status, traces.counts())
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
        traces.end(exchange)
        gateway_metrics.observe(exchange)
        log_exchange(exchange)
        if exchange.usage:
            retry_after.observe(exchange.seconds)

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        try:
            async with extension.running(), models.running():
                yield
        finally:
            await asyncio.to_thread(traces.close)

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
        identified=traces.begin,
        open_paths=OPEN_PATHS | open_paths() if config.web else OPEN_PATHS,
    )
    return app


class Traces(NamedTuple):
    """Functions that trace requests. They do nothing while traces are off."""

    begin: Callable[[Exchange, Headers], None] = lambda _exchange, _headers: None
    end: Callable[[Exchange], None] = lambda _exchange: None
    counts: Callable[[], Mapping[str, int]] = dict
    """Returns the number of spans by outcome."""
    close: Callable[[], None] = lambda: None


def open_traces(gateway: str, routes: frozenset[str]) -> Traces:
    """Return the traces of a gateway. Raises `ConfigError` for environment variables that cannot be followed."""
    if not traces_are_on(os.environ):
        return Traces()
    # The SDK takes 20 MB and a quarter of a second, so only traced gateways load it.
    from mars_ray.serve.http.request_spans import RequestSpans
    from mars_ray.traces.tracer import Tracer

    tracer = Tracer(os.environ, instance=gateway)
    spans = RequestSpans(tracer, routes)
    return Traces(spans.begin, spans.end, lambda: asdict(tracer.counts), tracer.close)

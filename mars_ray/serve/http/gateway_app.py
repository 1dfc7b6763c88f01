"""The complete HTTP gateway as one ASGI app: access middleware, routes, log and metrics around an engine client.

In:    settings, a client of the engines, the folder of the model, clients of the controller and the store of responses.
Out:   one ASGI app for any ASGI server.
Never: imports Ray.
"""

from pathlib import Path

from mars_ray.control.core.status import ClusterStatus
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.mode import Mode
from mars_ray.engine.service_class import BATCH_CLASS
from mars_ray.errors import UnavailableError
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.serve.http.control_routes import ControlClient
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.gateway_metrics import GatewayMetrics, merge_metrics
from mars_ray.serve.http.response_store import ResponseStoreClient
from mars_ray.serve.http.routes import make_app
from mars_ray.serve.http.tokenizer_process import TokenizerProcess
from mars_ray.serve.middleware.access import AccessMiddleware
from mars_ray.serve.middleware.admission import RetryAfter
from mars_ray.serve.middleware.api_keys import KeyFile
from mars_ray.serve.middleware.exchange import Exchange, log_exchange
from mars_ray.serve.middleware.scope import OPEN_PATHS
from mars_ray.serve.replicas.engine_client import EngineClient
from mars_ray.web.pages import open_paths


def make_endpoint(client: EngineClient, config: ServeConfig, folder: Path) -> Endpoint:
    """Return the endpoint of the model in `folder`."""
    return Endpoint(
        client,
        TokenizerProcess(folder, tool_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser),
        config.limits,
        default_mode=Mode(config.mode),
        default_sampling=generation_defaults(folder),
        log_prompts=config.log_prompts,
        migration_limit=config.migration_limit,
        batch_class=BATCH_CLASS if BATCH_CLASS in [service_class.name for service_class in config.classes] else None,
    )


def make_gateway_app(
    endpoint: Endpoint, control: ControlClient, store: ResponseStoreClient, config: ServeConfig, *, name: str
) -> AccessMiddleware:
    """Return the app. `name` identifies this process in the metrics. Raises `ConfigError` for a bad key file."""
    gateway_metrics = GatewayMetrics(model=config.model_name, gateway=name)
    retry_after = RetryAfter()
    classes = [service_class.name for service_class in config.classes]

    async def metrics() -> str:
        in_flight = sum(app.admission.in_flight.values())
        text = gateway_metrics.text(in_flight, await status_for_prices())
        return merge_metrics([text, *await endpoint.client.metrics()])

    async def status_for_prices() -> ClusterStatus | None:
        """Return the state of the cluster; None if the replicas have no price, or if no controller answers."""
        try:
            return None if config.engine.replica_price is None else await control.status()
        except UnavailableError:
            return None

    def observe(exchange: Exchange) -> None:
        gateway_metrics.observe(exchange)
        log_exchange(exchange)
        if exchange.usage:
            retry_after.observe(exchange.seconds)

    app = AccessMiddleware(
        make_app(endpoint, control, store, metrics, retry_after_s=retry_after.seconds, web=config.web),
        keys=KeyFile(config.keys, classes=classes) if config.keys else None,
        default_class=classes[0],
        limits=config.limits,
        allowed_hosts=config.allowed_hosts,
        retry_after_s=retry_after.seconds,
        observe=observe,
        open_paths=OPEN_PATHS | open_paths() if config.web else OPEN_PATHS,
    )
    return app

"""The whole HTTP side of the endpoint, put together: door, routes, log and metrics around a client.

In:    settings, a client, the folder of the model.
Out:   one ASGI app, to be run by anything that runs such apps.
Never: imports Ray.
"""

from pathlib import Path

from mars_ray.engine.mode import Mode
from mars_ray.serve.deploy.config import ServeConfig
from mars_ray.serve.http.control_routes import Control
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.metrics import FrontMetrics, merge
from mars_ray.serve.http.prompts import Prompts
from mars_ray.serve.http.request_log import log_exchange
from mars_ray.serve.http.routes import make_app
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.middleware.guard import Guard
from mars_ray.serve.middleware.keys import KeyFile
from mars_ray.serve.middleware.retry_after import Pace
from mars_ray.serve.replicas.client import Client


def make_front(client: Client, control: Control, config: ServeConfig, folder: Path, *, name: str) -> Guard:
    """Return the app. `name` tells this process from others in the metrics. Raises `ConfigError` for a bad key file."""
    endpoint = Endpoint(
        client, Prompts(folder), config.limits, default_mode=Mode(config.mode), log_prompts=config.log_prompts
    )
    figures, pace = FrontMetrics(model=config.model_name, front=name), Pace()

    async def metrics() -> str:
        return merge([figures.text(sum(guard.admission.in_flight.values())), *await client.metrics()])

    def observe(exchange: Exchange) -> None:
        figures.observe(exchange)
        log_exchange(exchange)
        if exchange.tally:
            pace.observe(exchange.seconds)

    guard = Guard(
        make_app(endpoint, control, metrics, retry_after_s=pace.retry_after_s),
        keys=KeyFile(config.keys, classes=[each.name for each in config.classes]) if config.keys else None,
        default_class=config.classes[0].name,
        limits=config.limits,
        allowed_hosts=config.allowed_hosts,
        retry_after_s=pace.retry_after_s,
        observe=observe,
    )
    return guard

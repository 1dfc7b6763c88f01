"""Build the Serve application of an endpoint: gateways (for HTTP or for handle calls) and engines.

`serve deploy` and `mars-ray serve` build the application from the `args` of a config file. Options under `deployments`
in that file override the options set here.

Gateways and engines are two deployments: a gateway outlives an engine that dies, so it can send the request elsewhere,
and it keeps JSON, templates and tokenisation off the engines' cores.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from mars_ray.engine.request import Request
from mars_ray.serve.deploy.serve_config import ServeConfig, parse_config
from mars_ray.serve.ray.engine_replica import EngineReplica
from mars_ray.serve.ray.gateway import Chat, Gateway, MakeGateway, make_gateway
from mars_ray.serve.ray.pinned import pinned_model
from mars_ray.serve.replicas.liveness import HEARD
from mars_ray.serve.replicas.prefix_routing import prefix_keys, ranked


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Routes each call by the engine request that it carries; calls without one go to the least loaded replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return one replica per rank, best first. Ray takes the first replica with capacity."""
        if pending_request:
            # The ranks already contain all replicas that answer. Without backoff, Ray would try them again without a
            # pause.
            pending_request.routing_context.should_backoff = True
        request = next(iter(pending_request.args), None) if pending_request else None
        keys = self.keys_of(request) if isinstance(request, Request) else [""]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        by_id = {name: replica for name, replica in by_id.items() if not HEARD.silent(name)} or by_id
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_id.items()}
        return [[by_id[name]] for name in ranked(keys, loads)] if loads else []

    def keys_of(self, request: Request) -> list[str]:
        """Return the keys by which a request prefers replicas."""
        return prefix_keys(request)


DRAIN_SECONDS = 120
"""Seconds that running requests are given to finish when their replica stops."""

HEALTH_SECONDS = 1
HEALTH_TIMEOUT_SECONDS = 30
"""Maximum seconds for a health check. After three failures in a row, the replica is replaced."""

ONGOING_REQUESTS = 100_000
"""Serve's limit on concurrent calls per replica, set too high to be reached. Gateways and engines refuse requests with
OpenAI's errors instead, and a replica that Serve considers full would not answer health checks."""

OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": ONGOING_REQUESTS,
    "graceful_shutdown_timeout_s": DRAIN_SECONDS,
    "health_check_period_s": HEALTH_SECONDS,
}
"""Options of all deployments."""
SHELL_OPTIONS: dict[str, Any] = OPTIONS | {"ray_actor_options": {"num_cpus": 0}}
"""Options of deployments that wait more than they compute."""
C = TypeVar("C", bound=ServeConfig)


def build_openai_app(args: dict[str, Any]) -> Application:
    """Return an endpoint that speaks OpenAI's API under any route prefix.

    `args` are the settings of `ServeConfig`. A handle to the endpoint also has the methods of a `build_deployment`
    handle. Raises `ConfigError` for unknown or impossible settings, `ModelError` for an unusable model.
    """
    config = pinned_config(parse_config(ServeConfig, args))
    return gateway_application(make_gateway, engines_of(config), config)


def build_deployment(args: dict[str, Any], *, name_prefix: str = "") -> Application:
    """Return a model's application, which other deployments take as a bound argument and call through its handle.

    `handle.options(stream=True).chat.remote(messages, threshold=0.9)` streams an answer, and
    `handle.complete.remote(messages)` returns a complete answer. Settings and errors are those of `build_openai_app`.
    The deployments are named `Chat` and `Engine`; with several models in one application, give each a `name_prefix`.
    """
    config = pinned_config(parse_config(ServeConfig, args))
    return chat_application(make_gateway, engines_of(config, name_prefix), config, name_prefix=name_prefix)


def gateway_application(make: MakeGateway, engines: Application, config: ServeConfig, *others: Application) -> Any:
    """Return the application of HTTP gateways whose parts `make` makes; it also runs `others`."""
    gateway = serve.deployment(serve.ingress()(Gateway)).options(name="Gateway", **SHELL_OPTIONS)
    return gateway.bind(make, engines, config, *others)


def chat_application(
    make: MakeGateway, engines: Application, config: ServeConfig, *others: Application, name_prefix: str = ""
) -> Any:
    """Return the application of gateways for calls by handle, from which `make` makes others; it also runs `others`."""
    chat = serve.deployment(Chat).options(name=f"{name_prefix}Chat", **SHELL_OPTIONS)
    return chat.bind(make, engines, config, *others)


def pinned_config(config: C) -> C:
    """Return the settings with names of models that mean the same on every node."""
    return pinned_model(config).model_copy(update={"name": config.model_name})


def engines_of(config: ServeConfig, name_prefix: str = "") -> Application:
    """Return the engines of the main model."""
    app: Application = engine_deployment(config, name_prefix, config.engine.threads or 1).bind(config)
    return app


def engine_deployment(
    config: ServeConfig, name_prefix: str, cpus: int, ray_actor_options: Mapping[str, Any] | None = None
) -> Deployment:
    """Return the deployment of engines that reserve `cpus` each, unless `ray_actor_options` say otherwise."""
    gpus = config.engine.tensor_parallel_size
    resources = {"num_cpus": cpus} | ({"num_gpus": gpus} if gpus > 1 else {}) | dict(ray_actor_options or {})
    engines: Deployment = serve.deployment(EngineReplica).options(
        name=f"{name_prefix}Engine",
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        ray_actor_options=resources,
        **OPTIONS,
    )
    return engines

"""Build the Serve application of an endpoint: gateways (for HTTP or for handle calls), engines, and the manager of
further models.

`serve deploy` and `mars-ray serve` build the application from the `args` of a config file. Options under `deployments`
in that file override the options set here.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from mars_ray.engine.request import Request
from mars_ray.serve.deploy.model_settings import AddedModel
from mars_ray.serve.deploy.serve_config import ServeConfig, parse_config
from mars_ray.platform.ray.batches import Batches
from mars_ray.serve.ray.chat_handle import Chat
from mars_ray.serve.ray.engine_replica import EngineReplica
from mars_ray.serve.ray.gateway import Gateway
from mars_ray.platform.ray.models import Models
from mars_ray.serve.ray.pinned import pinned_model
from mars_ray.serve.replicas.liveness import HEARD
from mars_ray.serve.replicas.prefix_routing import prefix_key, ranked


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
        key = prefix_key(request.tenant, request.prompt) if isinstance(request, Request) else ""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        by_id = {name: replica for name, replica in by_id.items() if not HEARD.silent(name)} or by_id
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_id.items()}
        return [[by_id[name]] for name in ranked(key, loads)] if loads else []


DRAIN_SECONDS = 120
"""Seconds that running requests are given to finish when their replica stops."""

RUNNER_DRAIN_SECONDS = 10
"""Seconds that the runner of batches is given to store results when it stops. The rows in flight run again later."""

HEALTH_SECONDS = 1
HEALTH_TIMEOUT_SECONDS = 30
"""Maximum seconds for a health check. After three failures in a row, the replica is replaced."""

ONGOING_REQUESTS = 100_000
"""Serve's limit on concurrent calls per replica, set too high to be reached. Gateways and engines refuse requests with
OpenAI's errors instead, and a replica that Serve considers full would not answer health checks."""

_OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": ONGOING_REQUESTS,
    "graceful_shutdown_timeout_s": DRAIN_SECONDS,
    "health_check_period_s": HEALTH_SECONDS,
}


class Ingress:
    """The deployment through which requests would enter the application of a further model. It has no replica.

    Serve refuses a request router of the application's own at an ingress behind HAProxy, so the engines are none.
    """

    def __init__(self, _engines: DeploymentHandle) -> None:
        """Take the handle that binds the engines into the application."""


def build_openai_app(args: dict[str, Any]) -> Application:
    """Return an endpoint that speaks OpenAI's API under any route prefix.

    `args` are the settings of `ServeConfig`. A handle to the endpoint also has the methods of a `build_deployment`
    handle. Raises `ConfigError` for unknown or impossible settings, `ModelError` for an unusable model.
    """
    config = _pinned(args)
    gateway = serve.deployment(serve.ingress()(Gateway)).options(
        name="Gateway", ray_actor_options={"num_cpus": 0}, **_OPTIONS
    )
    engines = _engines(config)
    models = _models(config)
    app: Application = gateway.bind(engines, config, models, *_batches(engines, config, models))
    return app


def build_deployment(args: dict[str, Any], *, name_prefix: str = "") -> Application:
    """Return a model's application, which other deployments take as a bound argument and call through its handle.

    `handle.options(stream=True).chat.remote(messages, threshold=0.9)` streams an answer, and
    `handle.complete.remote(messages)` returns a complete answer. Settings and errors are those of `build_openai_app`.
    The deployments are named `Chat`, `Engine` and `Models`, and with storage also `Batches`; with several models in one
    application, give each a `name_prefix`.
    """
    config = _pinned(args)
    chat = serve.deployment(Chat).options(name=f"{name_prefix}Chat", ray_actor_options={"num_cpus": 0}, **_OPTIONS)
    engines = _engines(config, name_prefix)
    models = _models(config, name_prefix)
    app: Application = chat.bind(engines, config, models, *_batches(engines, config, models, name_prefix))
    return app


def _pinned(args: dict[str, Any]) -> ServeConfig:
    config = parse_config(args)
    models = {name: pinned_model(model) for name, model in config.models.items()}
    return pinned_model(config).model_copy(update={"name": config.model_name, "models": models})


def _engines(config: ServeConfig, name_prefix: str = "") -> Application:
    cpus = config.engine.threads or 1
    app: Application = _engine_deployment(config, name_prefix, cpus).bind(config)
    return app


def added_engines(config: ServeConfig, settings: AddedModel) -> Application:
    """Return the application of the engines of a further model, without a route. `config` is that of the model
    alone."""
    engines = _engine_deployment(config, "", config.engine.threads or 0, settings.ray_actor_options)
    if settings.max_replicas in (None, settings.min_replicas):
        engines = engines.options(num_replicas=settings.min_replicas)
    else:
        bounds = {"min_replicas": settings.min_replicas, "max_replicas": settings.max_replicas}
        policy = {"policy_function": "mars_ray.serve.ray.autoscaling:by_capacity"}
        engines = engines.options(autoscaling_config=AutoscalingConfig(**bounds, policy=policy))
    ingress = serve.deployment(Ingress).options(
        autoscaling_config=AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=1),
        ray_actor_options={"num_cpus": 0},
    )
    app: Application = ingress.bind(engines.bind(config))
    return app


def _engine_deployment(
    config: ServeConfig, name_prefix: str, cpus: int, ray_actor_options: Mapping[str, Any] | None = None
) -> Deployment:
    gpus = config.engine.tensor_parallel_size
    resources = {"num_cpus": cpus} | ({"num_gpus": gpus} if gpus > 1 else {}) | dict(ray_actor_options or {})
    engines: Deployment = serve.deployment(EngineReplica).options(
        name=f"{name_prefix}Engine",
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        ray_actor_options=resources,
        **_OPTIONS,
    )
    return engines


def _models(config: ServeConfig, name_prefix: str = "") -> Application:
    """Return the manager of the further models."""
    manager = serve.deployment(Models).options(
        name=f"{name_prefix}Models", ray_actor_options={"num_cpus": 0}, **_OPTIONS
    )
    app: Application = manager.bind(config)
    return app


def _batches(
    engines: Application, config: ServeConfig, models: Application, name_prefix: str = ""
) -> tuple[Application, ...]:
    """Return the runner of batches, if the endpoint has storage."""
    if config.storage is None:
        return ()
    runner = serve.deployment(Batches).options(
        name=f"{name_prefix}Batches",
        ray_actor_options={"num_cpus": 0},
        **_OPTIONS | {"graceful_shutdown_timeout_s": RUNNER_DRAIN_SECONDS},
    )
    return (runner.bind(engines, config, models),)

"""Build a model's Serve application, which consists of gateways (for HTTP or for handle calls) and engines.

`serve deploy` and `mars-ray serve` build the application from the `args` of a config file. Options under `deployments`
in that file override the options set here.
"""

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from mars_ray.adapter.card import resolve_adapter
from mars_ray.engine.request import Request
from mars_ray.model.resolve import is_folder_here, pin, resolve_model
from mars_ray.model.sources.ray_folder import share_folder
from mars_ray.serve.deploy.serve_config import ServeConfig, parse_config
from mars_ray.serve.ray.chat_handle import Chat
from mars_ray.serve.ray.engine_replica import EngineReplica
from mars_ray.serve.ray.gateway import Gateway
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


def build_openai_app(args: dict[str, Any]) -> Application:
    """Return an endpoint that speaks OpenAI's API under any route prefix.

    `args` are the settings of `ServeConfig`. A handle to the endpoint also has the methods of a `build_deployment`
    handle. Raises `ConfigError` for unknown or impossible settings, `ModelError` for an unusable model.
    """
    config = _pinned(args)
    gateway = serve.deployment(serve.ingress()(Gateway)).options(
        name="Gateway", ray_actor_options={"num_cpus": 0}, **_OPTIONS
    )
    app: Application = gateway.bind(_engines(config), config)
    return app


def build_deployment(args: dict[str, Any], *, name_prefix: str = "") -> Application:
    """Return a model's application, which other deployments take as a bound argument and call through its handle.

    `handle.options(stream=True).chat.remote(messages, threshold=0.9)` streams an answer, and
    `handle.complete.remote(messages)` returns a complete answer. Settings and errors are those of `build_openai_app`.
    The deployments are named `Chat` and `Engine`; with several models in one application, give each a `name_prefix`.
    """
    config = _pinned(args)
    chat = serve.deployment(Chat).options(name=f"{name_prefix}Chat", ray_actor_options={"num_cpus": 0}, **_OPTIONS)
    app: Application = chat.bind(_engines(config, name_prefix), config)
    return app


def _pinned(args: dict[str, Any]) -> ServeConfig:
    config = parse_config(args)
    # Pin the names now, because a hub branch may move before the next replica starts, possibly on another node.
    pinned: dict[str, Any] = {"model": _everywhere(config.model, resolve_model(config.model))}
    pinned["name"] = config.model_name
    pinned["adapter"] = _pinned_adapter(config.adapter)
    pinned["adapters"] = {name: _pinned_adapter(adapter) for name, adapter in config.adapters.items()}
    return config.model_copy(update=pinned)


def _engines(config: ServeConfig, name_prefix: str = "") -> Application:
    gpus = config.engine.tensor_parallel_size
    resources = {"num_cpus": config.engine.threads or 1} | ({"num_gpus": gpus} if gpus > 1 else {})
    engines = serve.deployment(EngineReplica).options(
        name=f"{name_prefix}Engine",
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        ray_actor_options=resources,
        **_OPTIONS,
    )
    app: Application = engines.bind(config)
    return app


def _pinned_adapter(adapter: str | None) -> str | None:
    folder = resolve_adapter(adapter)
    return _everywhere(adapter, folder) if adapter and folder else None


def _everywhere(name: str, folder: Path) -> str:
    """Return a name that refers to the content of `folder`, a model or an adapter, on every node and at any time."""
    return str(share_folder(folder)) if is_folder_here(name) else pin(name, folder)

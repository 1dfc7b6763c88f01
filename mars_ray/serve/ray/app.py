"""Build a Serve application of a model: gateways for HTTP or handle calls, and engines (shell).

`serve deploy` and `mars-ray serve` build it from the `args` of a config file; what stands under `deployments` there
takes the place of what is set here.
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
    """Routes by the engine request that a call carries; calls without one go to the least loaded replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of one replica each; Ray takes the first that has room."""
        if pending_request:
            # All replicas that answer are among the ranks. Unless told so, Ray asks again at once, without a pause.
            pending_request.routing_context.should_backoff = True
        request = next(iter(pending_request.args), None) if pending_request else None
        key = prefix_key(request.tenant, request.prompt) if isinstance(request, Request) else ""
        by_id = {each.replica_id.unique_id: each for each in candidate_replicas}
        by_id = {name: each for name, each in by_id.items() if not HEARD.silent(name)} or by_id
        loads = {name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in by_id.items()}
        return [[by_id[name]] for name in ranked(key, loads)] if loads else []


DRAIN_SECONDS = 120
"""Seconds that running requests get to end when a replica is to stop."""

HEALTH_SECONDS = 1
HEALTH_TIMEOUT_SECONDS = 30
"""Seconds for a health check; after three failures in a row the replica is replaced."""

ONGOING_REQUESTS = 100_000
"""Serve's limit of concurrent calls of a replica, set out of reach: gateways and engines refuse with OpenAI's errors,
and a replica that Serve considers full would not answer health questions."""


def build_openai_app(args: dict[str, Any]) -> Application:
    """Return an endpoint that speaks OpenAI's API, under whatever route prefix it is run.

    `args` are the settings of `ServeConfig`. Its handle has the methods of `build_deployment`, too.
    Raises `ConfigError` for unknown or impossible settings, `ModelError` for no model.
    """
    config = _pinned(args)
    gateway = serve.deployment(serve.ingress()(Gateway)).options(
        name="Gateway",
        max_ongoing_requests=ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    app: Application = gateway.bind(_engines(config), config)
    return app


def build_deployment(args: dict[str, Any], *, name_prefix: str = "") -> Application:
    """Return a model for other deployments, which are bound to it and call its handle.

    The handle streams with `options(stream=True).chat.remote(messages, threshold=0.9)` and answers whole with
    `complete.remote(messages)`. Settings and errors are those of `build_openai_app`. The deployments are called `Chat`
    and `Engine`; models that stand side by side get a `name_prefix` each.
    """
    config = _pinned(args)
    chat = serve.deployment(Chat).options(
        name=f"{name_prefix}Chat",
        max_ongoing_requests=ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    app: Application = chat.bind(_engines(config, name_prefix), config)
    return app


def _pinned(args: dict[str, Any]) -> ServeConfig:
    config = parse_config(args)
    # A branch of a hub may move before the next replica starts, and that may be on another node.
    pinned: dict[str, Any] = {"model": _everywhere(config.model, resolve_model(config.model))}
    pinned["name"] = config.model_name
    pinned["adapter"] = _pinned_adapter(config.adapter)
    pinned["adapters"] = {name: _pinned_adapter(adapter) for name, adapter in config.adapters.items()}
    return config.model_copy(update=pinned)


def _engines(config: ServeConfig, name_prefix: str = "") -> Application:
    engines = serve.deployment(EngineReplica).options(
        name=f"{name_prefix}Engine",
        max_ongoing_requests=ONGOING_REQUESTS,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        ray_actor_options={"num_cpus": config.engine.threads or 1},
    )
    app: Application = engines.bind(config)
    return app


def _pinned_adapter(adapter: str | None) -> str | None:
    folder = resolve_adapter(adapter)
    return _everywhere(adapter, folder) if adapter and folder else None


def _everywhere(name: str, folder: Path) -> str:
    """Return a name for the model or adapter in `folder` that means the same on every node and does not change."""
    return str(share_folder(folder)) if is_folder_here(name) else pin(name, folder)

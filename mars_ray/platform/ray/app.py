"""Build the Serve application of an endpoint with a platform: the core's gateways and engines, the manager of further
models, and the runner of batches.

`serve deploy` and `mars-ray serve` build the application from the `args` of a config file. Options under `deployments`
in that file override the options set here.
"""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig
from ray.serve.handle import DeploymentHandle

from mars_ray.platform.platform_config import AddedModel, PlatformConfig
from mars_ray.platform.ray.batches import Batches
from mars_ray.platform.ray.gateway import make_gateway
from mars_ray.platform.ray.models import Models
from mars_ray.serve.deploy.serve_config import parse_config
from mars_ray.serve.ray.app import (
    SHELL_OPTIONS,
    chat_application,
    engine_deployment,
    engines_of,
    gateway_application,
    pinned_config,
)
from mars_ray.serve.ray.pinned import pinned_model

RUNNER_DRAIN_SECONDS = 10
"""Seconds that the runner of batches is given to store results when it stops. The rows in flight run again later."""


class Ingress:
    """Ingress of a further model's application, which Serve demands. It has no replica.

    Serve refuses a request router at an ingress behind HAProxy, so the engines cannot be the ingress.
    """

    def __init__(self, _engines: DeploymentHandle) -> None:
        """Accept the engines' handle, so that Serve deploys the engines."""


def build_openai_app(args: dict[str, Any]) -> Application:
    """Return an endpoint that speaks OpenAI's API under any route prefix.

    `args` are the settings of `PlatformConfig`. A handle to the endpoint also has the methods of a `build_deployment`
    handle. Raises `ConfigError` for unknown or impossible settings, `ModelError` for an unusable model.
    """
    config = _pinned(args)
    engines = engines_of(config)
    app: Application = gateway_application(make_gateway, engines, config, *_others(engines, config))
    return app


def build_deployment(args: dict[str, Any], *, name_prefix: str = "") -> Application:
    """Return a model's application, which other deployments take as a bound argument and call through its handle.

    `handle.options(stream=True).chat.remote(messages, threshold=0.9)` streams an answer, and
    `handle.complete.remote(messages)` returns a complete answer. Settings and errors are those of `build_openai_app`.
    The deployments are named `Chat`, `Engine` and `Models`, and with storage also `Batches`; with several models in one
    application, give each a `name_prefix`.
    """
    config = _pinned(args)
    engines = engines_of(config, name_prefix)
    others = _others(engines, config, name_prefix)
    app: Application = chat_application(make_gateway, engines, config, *others, name_prefix=name_prefix)
    return app


def _pinned(args: dict[str, Any]) -> PlatformConfig:
    config = pinned_config(parse_config(PlatformConfig, args))
    return config.model_copy(update={"models": {name: pinned_model(model) for name, model in config.models.items()}})


def added_engines(config: PlatformConfig, settings: AddedModel) -> Application:
    """Return the application of a further model's engines, without a route. `config` belongs to that model alone."""
    engines = engine_deployment(config, "", config.engine.threads or 0, settings.ray_actor_options)
    least = settings.min_replicas
    most = settings.max_replicas or max(1, least)
    if least == most:
        engines = engines.options(num_replicas=least)
    else:
        scaling = AutoscalingConfig(
            min_replicas=least,
            initial_replicas=max(1, least),  # the first engine shows that the model can start
            max_replicas=most,
            downscale_to_zero_delay_s=settings.downscale_to_zero_delay_s,
            policy={"policy_function": "mars_ray.serve.ray.autoscaling:by_capacity"},
        )
        engines = engines.options(autoscaling_config=scaling)
    ingress = serve.deployment(Ingress).options(
        autoscaling_config=AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=1),
        ray_actor_options={"num_cpus": 0},
    )
    app: Application = ingress.bind(engines.bind(config))
    return app


def _others(engines: Application, config: PlatformConfig, name_prefix: str = "") -> tuple[Application, ...]:
    """Return the manager of the further models and, if the endpoint has storage, the runner of batches."""
    models = serve.deployment(Models).options(name=f"{name_prefix}Models", **SHELL_OPTIONS).bind(config)
    if config.storage is None:
        return (models,)
    options = SHELL_OPTIONS | {"graceful_shutdown_timeout_s": RUNNER_DRAIN_SECONDS}
    batches = serve.deployment(Batches).options(name=f"{name_prefix}Batches", **options)
    return models, batches.bind(engines, config, models)

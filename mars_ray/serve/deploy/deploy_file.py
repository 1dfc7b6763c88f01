"""Read, check and complete a Serve config file of this endpoint.

In:    a path, or None; command-line options.
Out:   the fields of Ray Serve's schema, with one application. The settings under `args` are checked here. Names and
       values that belong to Ray Serve are checked by `serve.ray.schema`, which takes the rules from Ray.
Never: reads the key file; reads the model, except in `share_cpus`. The nodes must have both, but this machine need
       not have either.

Relative paths in the file start from the working directory, like those on the command line and in every other file.
They are made absolute because the processes that open them may run in another working directory.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mars_ray.errors import ConfigError
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import exists, resolve_model
from mars_ray.model.threads import threads_alone
from mars_ray.serve.deploy.model_settings import engine_fields
from mars_ray.serve.deploy.serve_config import ServeConfig, check_exposure, parse_config

APPLICATION = {"name": "mars", "route_prefix": "/", "import_path": "mars_ray.ray_serve:build_openai_app"}


def read_deploy_file(
    settings: type[ServeConfig],
    path: Path | None,
    *,
    model: str | None = None,
    adapters: Sequence[str] = (),
    engine: Mapping[str, Any] | None = None,
    host: str | None = None,
    port: int | None = None,
) -> dict[str, Any]:
    """Return the fields of the file at `path`; if `path` is None, return defaults for a single machine.

    `settings` is the class of the endpoint's settings.

    The other arguments override those fields. `adapters` are folders or hub names; the prefix `NAME=` marks an adapter
    that callers select by name. `engine` holds fields of `EngineConfig`; for each field that is None, the file's value
    stays. Raises a `ConfigError` that names the file and the field.
    """
    source = "the command line" if path is None else str(path)
    fields = {} if path is None else _read(path)
    http = {"host": "127.0.0.1", "port": 8000} | _mapping(fields, "http_options", source)
    http |= {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    http |= _certificate(http, source)
    application = _application(fields, source, settings.deployments)
    args = _mapping(application, "args", f"{source}: applications[0]")
    if "engine" in args:
        args = args | {"engine": engine_fields(args["engine"])}
    if model is not None:
        args = args | {"model": model}
    if adapters:
        args = args | _adapters(adapters)
    engine = {name: value for name, value in (engine or {}).items() if value is not None}
    if engine:
        args = args | {"engine": _mapping(args, "engine", f"{source}: applications[0].args") | engine}
    config = parse_config(settings, args, source, "applications[0].args")
    if config.engine.paths:
        args = args | {"engine": args["engine"] | config.engine.paths}
    check_exposure(str(http["host"]), config)
    args = args | {name: path for name, path in config.absolute_paths().items() if path != getattr(config, name)}
    return (
        {"proxy_location": "HeadOnly", "logging_config": {"enable_access_log": False}}
        | fields
        | {"http_options": http, "applications": [application | {"args": args}]}
    )


def read_settings(path: Path, advice: str) -> dict[str, Any]:
    """Return the settings in a YAML file. Raises a `ConfigError`, which ends with `advice` if there are none."""
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds no settings. {advice}")
    return fields


def _read(path: Path) -> dict[str, Any]:
    fields = read_settings(path, "See serve_configs/.")
    if fields.get("kind") == "RayService":
        raise ConfigError(f"{path} is for Kubernetes: use kubectl apply -f {path}. See serve_configs/ for other files.")
    return fields


def _mapping(fields: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    """Return the mapping under `name`, or an empty one if the name is missing."""
    mapping = fields.get(name)
    if not isinstance(mapping, dict | None):
        raise ConfigError(f"{source}: {name} is {mapping!r}, must be a mapping of fields.")
    return mapping or {}


def _certificate(http: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the absolute paths of the certificate and the key. Raises `ConfigError` if only one of them is given."""
    paths = {name: http[name] for name in ("ssl_certfile", "ssl_keyfile") if http.get(name)}
    for name in ("ssl_keyfile_password", "ssl_ca_certs"):
        if http.get(name):
            raise ConfigError(f"{source}: http_options.{name} is not supported: the load balancer does not use it.")
    if len(paths) == 1:
        raise ConfigError(f"{source}: http_options: set both ssl_certfile and ssl_keyfile, or neither.")
    return {name: str(Path(str(path)).expanduser().absolute()) for name, path in paths.items()}


def _application(fields: dict[str, Any], source: str, known: Sequence[str]) -> dict[str, Any]:
    applications = fields.get("applications") or [APPLICATION]
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{source}: applications: give exactly one application; `serve deploy` takes several.")
    application: dict[str, Any] = applications[0]
    deployments = application.get("deployments") or []
    for number, deployment in enumerate(deployments if isinstance(deployments, list) else ()):
        name = deployment.get("name") if isinstance(deployment, dict) else deployment
        if name not in known:
            raise ConfigError(
                f"{source}: applications[0].deployments[{number}]: unknown deployment {name!r}. "
                f"Known are {', '.join(known)}."
            )
    return application


def _adapters(options: Sequence[str]) -> dict[str, Any]:
    """Return the settings `adapter` and `adapters` for the options `--adapter DIR` and `--adapter NAME=DIR`."""
    settings: dict[str, Any] = {"adapter": None, "adapters": {}}
    for option in options:
        # A path may contain "=".
        name, equals, folder = ("", "", option) if exists(Path(option).expanduser()) else option.partition("=")
        if equals:
            previous = settings["adapters"].get(name)
            settings["adapters"][name] = folder
        else:
            previous = settings["adapter"]
            settings["adapter"] = option
        if previous is not None or (equals and not (name and folder)):
            raise ConfigError(
                f"--adapter {option}: give DIR once, for all requests, and every NAME=DIR with a different name."
            )
    return settings


def share_cpus(settings: type[ServeConfig], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with this machine's CPUs divided among the maximum number of engines.

    Raises `ModelError` for a model that cannot be used.
    """
    [application] = fields["applications"]
    config = parse_config(settings, application.get("args") or {})
    deployments = application.get("deployments") or []
    engines: dict[str, Any] = next((entry for entry in deployments if entry.get("name") == "Engine"), {})
    autoscaling = engines.get("autoscaling_config") or {}
    replicas = autoscaling.get("max_replicas") if autoscaling else engines.get("num_replicas", 1)
    # Return the fields unchanged if they already set the CPUs, or if the number of engines is unknown:
    # `num_replicas: auto` means up to 100.
    if config.engine.threads or engines.get("ray_actor_options") or not isinstance(replicas, int) or replicas < 1:
        return fields
    threads = threads_alone(check_folder(resolve_model(config.model)).parameters.total(), replicas)
    args = application.get("args") or {}
    engine = (args.get("engine") or {}) | {"threads": threads}
    return fields | {"applications": [application | {"args": args | {"engine": engine}}]}

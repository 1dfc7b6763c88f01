"""Read, check and complete a Serve config file of this endpoint.

In:    a path, or none; what the command line says besides.
Out:   the fields of Ray Serve's schema, with one application. What stands under `args` is checked here; the names and
       values that are Ray Serve's own are checked by `serve.ray.schema`, which has them from Ray.
Never: opens the model or the keys: the nodes must have them, this machine need not.

Paths in the file start from the working directory, as those on the command line and in every other file do, and are
made absolute: the processes that open them run elsewhere.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mars_ray.errors import ConfigError
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import BUNDLED, resolve_model
from mars_ray.model.threads import threads_alone
from mars_ray.serve.deploy.serve_config import ServeConfig, check_exposure, parse_config

APPLICATION = {"name": "mars", "route_prefix": "/", "import_path": "mars_ray.ray_serve:build_openai_app"}

DEPLOYMENTS = ("Gateway", "Engine")
"""The deployments that `serve.ray.app` builds: the HTTP gateway, and the engine behind it."""


def read_deploy_file(
    path: Path | None,
    *,
    model: str | None = None,
    adapters: Sequence[str] = (),
    engine: Mapping[str, Any] | None = None,
    host: str | None = None,
    port: int | None = None,
) -> dict[str, Any]:
    """Return the fields of `path`, or of an endpoint on this machine alone, with what is given in their place.

    `adapters` are folders or hub names, with `NAME=` before each that callers choose by name. `engine` holds fields of
    `EngineConfig`; those that are None keep what the file says.
    Raises `ConfigError` naming the file and the field.
    """
    source = "the command line" if path is None else str(path)
    fields = {} if path is None else _read(path)
    http = {"host": "127.0.0.1", "port": 8000} | _mapping(fields, "http_options", source)
    http |= {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    http |= _certificate(http, source)
    application = _application(fields, source)
    args = _mapping(application, "args", f"{source}: applications[0]")
    if model is not None:
        args = args | {"model": model}
    if adapters:
        args = args | _adapters(adapters)
    engine = {name: value for name, value in (engine or {}).items() if value is not None}
    if engine:
        args = args | {"engine": _mapping(args, "engine", f"{source}: applications[0].args") | engine}
    config = parse_config(args, source, "applications[0].args")
    check_exposure(str(http["host"]), config)
    return (
        {"proxy_location": "HeadOnly", "logging_config": {"enable_access_log": False}}
        | fields
        | {"http_options": http, "applications": [application | {"args": args | _absolute(config)}]}
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds no settings. See serve_configs/.")
    if fields.get("kind") == "RayService":
        raise ConfigError(f"{path} is for Kubernetes: kubectl apply -f {path}. See serve_configs/ for files to serve.")
    return fields


def _mapping(fields: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    """Return the fields under `name`; none if the name is missing."""
    found = fields.get(name)
    if not isinstance(found, dict | None):
        raise ConfigError(f"{source}: {name} is {found!r}; give fields.")
    return found or {}


def _certificate(http: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the absolute paths of certificate and key. Raises `ConfigError` if only one is given."""
    given = {name: http[name] for name in ("ssl_certfile", "ssl_keyfile") if http.get(name)}
    for name in ("ssl_keyfile_password", "ssl_ca_certs"):
        if http.get(name):
            raise ConfigError(f"{source}: http_options.{name} is not supported: the load balancer has no use for it.")
    if len(given) == 1:
        raise ConfigError(f"{source}: http_options: give ssl_certfile and ssl_keyfile, both or neither.")
    return {name: str(Path(str(path)).expanduser().absolute()) for name, path in given.items()}


def _application(fields: dict[str, Any], source: str) -> dict[str, Any]:
    applications = fields.get("applications") or [APPLICATION]
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{source}: applications: give exactly one application.")
    application: dict[str, Any] = applications[0]
    deployments = application.get("deployments") or []
    for number, deployment in enumerate(deployments if isinstance(deployments, list) else ()):
        name = deployment.get("name") if isinstance(deployment, dict) else deployment
        if name not in DEPLOYMENTS:
            raise ConfigError(
                f"{source}: applications[0].deployments[{number}]: unknown deployment {name!r}. "
                f"Known are {', '.join(DEPLOYMENTS)}."
            )
    return application


def _adapters(given: Sequence[str]) -> dict[str, Any]:
    """Return the settings of `--adapter DIR` and `--adapter NAME=DIR`."""
    found: dict[str, Any] = {"adapter": None, "adapters": {}}
    for each in given:
        name, named, folder = each.partition("=")
        if not named:
            taken, found["adapter"] = found["adapter"], each
        else:
            taken, found["adapters"][name] = found["adapters"].get(name), folder
        if taken is not None or (named and not (name and folder)):
            raise ConfigError(f"--adapter {each}: give DIR once, for all requests, and NAME=DIR with different names.")
    return found


def _absolute(config: ServeConfig) -> dict[str, Any]:
    """Return the path settings that change when made absolute."""
    paths: dict[str, Any] = {} if config.keys is None else {"keys": str(config.keys.expanduser().absolute())}
    paths["model"], paths["adapter"] = _found(config.model), config.adapter and _found(config.adapter)
    paths["adapters"] = {name: _found(adapter) for name, adapter in config.adapters.items()}
    return {field: found for field, found in paths.items() if found != getattr(config, field)}


def _found(name: str) -> str:
    """Return the absolute path of a folder on this machine; any other name unchanged."""
    folder = Path(name).expanduser()
    return str(folder.absolute()) if name != BUNDLED and folder.exists() else name


def share_cpus(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the CPUs of this machine shared between the largest number of engines that may run.

    Raises `ModelError` for a model that cannot be used.
    """
    [application] = fields["applications"]
    config = parse_config(application.get("args") or {})
    deployments = application.get("deployments") or []
    engines: dict[str, Any] = next((each for each in deployments if each.get("name") == "Engine"), {})
    autoscaling = engines.get("autoscaling_config") or {}
    replicas = autoscaling.get("max_replicas") if autoscaling else engines.get("num_replicas", 1)
    # What Ray sets aside is said, or cannot be known: `num_replicas: auto` means up to a hundred.
    if config.engine.threads or engines.get("ray_actor_options") or not isinstance(replicas, int) or replicas < 1:
        return fields
    folder = resolve_model(config.model)
    check_folder(folder)
    threads = threads_alone(folder, replicas)
    args = application.get("args") or {}
    engine = (args.get("engine") or {}) | {"threads": threads}
    return fields | {"applications": [application | {"args": args | {"engine": engine}}]}

"""The threads of engines that have this machine to themselves.

In:    the fields of a Serve config file, checked by `deploy_file` and `serve.ray.schema`; the model, which is here.
Out:   the fields, with the threads of each engine where they say neither threads nor CPUs.
"""

from typing import Any

from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import resolve_model
from mars_ray.model.threads import threads_alone
from mars_ray.serve.deploy.config import parse_config


def share_cpus(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the CPUs of this machine shared between as many engines as there may be.

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

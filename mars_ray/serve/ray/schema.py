"""Turn the fields of a Serve config file into Ray Serve's schema (shell).

In:    fields as `deploy_file` returns them, and what they came from.
Out:   the schema, or a `ConfigError` that says where the file is wrong.
Never: starts or asks a cluster.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from mars_ray.errors import ConfigError
from mars_ray.serve.deploy.serve_config import check_names


def schema_of(fields: dict[str, Any], source: str) -> ServeDeploySchema:
    """Return the schema. Raises `ConfigError` for names Ray Serve does not know, at any depth, and for bad values."""
    check_names(ServeDeploySchema, fields, source)
    try:
        schema = ServeDeploySchema(**fields)
    except ValidationError as error:
        raise _wrong(error, source, fields) from None
    for number, application in enumerate(schema.applications):
        for place, deployment in enumerate(application.deployments):
            # Ray's schema takes any mapping here, and looks at what is in it on the cluster.
            if isinstance(deployment.autoscaling_config, dict):
                here = ("applications", number, "deployments", place, "autoscaling_config")
                _check_autoscaling(deployment.autoscaling_config, source, here)
    return schema


def _check_autoscaling(fields: dict[str, Any], source: str, place: Sequence[str | int]) -> None:
    # A policy is code, which only the nodes need to have, and the model would import it.
    numbers = {name: value for name, value in fields.items() if name != "policy"}
    try:
        AutoscalingConfig(**numbers)
    except ValidationError as error:
        raise _wrong(error, source, fields, place) from None


def _wrong(error: ValidationError, source: str, fields: Any, above: Sequence[str | int] = ()) -> ConfigError:
    """Return the first error with its path in the file, without the types that pydantic tried."""
    first = error.errors()[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in above)
    for part in first["loc"]:
        known = isinstance(part, int) if isinstance(fields, list) else isinstance(fields, dict) and part in fields
        if known:
            fields = fields[part]
        if known or first["type"] == "missing":
            place += f"[{part}]" if isinstance(part, int) else f".{part}"
    where = f"{source}: {place.lstrip('.')}" if place else source
    shown = "" if isinstance(fields, dict | list) else f"; it is {fields!r}"
    return ConfigError(f"{where}: {first['msg'].removeprefix('Value error, ')}{shown}.")

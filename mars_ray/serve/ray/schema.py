"""Ray shell: turn the fields of a Serve config file into Ray Serve's schema.

In:    fields as returned by `deploy_file`, and the name of their source.
Out:   the schema, or a `ConfigError` that names the wrong field in the file.
Never: starts a cluster or connects to one.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from mars_ray.errors import ConfigError
from mars_ray.serve.deploy.serve_config import check_names


def schema_of(fields: dict[str, Any], source: str) -> ServeDeploySchema:
    """Return the schema. Raises `ConfigError` for names unknown to Ray Serve, at any depth, and for invalid values."""
    check_names(ServeDeploySchema, fields, source)
    try:
        schema = ServeDeploySchema(**fields)
    except ValidationError as error:
        raise _wrong(error, source, fields) from None
    for number, application in enumerate(schema.applications):
        for index, deployment in enumerate(application.deployments):
            # Ray's schema accepts any mapping here, and validates its content only on the cluster.
            if isinstance(deployment.autoscaling_config, dict):
                path = ("applications", number, "deployments", index, "autoscaling_config")
                _check_autoscaling(deployment.autoscaling_config, source, path)
    return schema


def _check_autoscaling(fields: dict[str, Any], source: str, path: Sequence[str | int]) -> None:
    # Leave out the policy: validating it would import its code, which only the nodes need to have.
    numbers = {name: value for name, value in fields.items() if name != "policy"}
    try:
        AutoscalingConfig(**numbers)
    except ValidationError as error:
        raise _wrong(error, source, fields, path) from None


def _wrong(error: ValidationError, source: str, fields: Any, parent: Sequence[str | int] = ()) -> ConfigError:
    """Return an error that names the first wrong field by its path in the file, without pydantic's names of types."""
    first = error.errors()[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parent)
    for part in first["loc"]:
        in_file = isinstance(part, int) if isinstance(fields, list) else isinstance(fields, dict) and part in fields
        if in_file:
            fields = fields[part]
        if in_file or first["type"] == "missing":
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
    where = f"{source}: {path.lstrip('.')}" if path else source
    shown = "" if isinstance(fields, dict | list) else f"; it is {fields!r}"
    return ConfigError(f"{where}: {first['msg'].removeprefix('Value error, ')}{shown}.")

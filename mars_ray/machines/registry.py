"""Step models by name, and from files."""

from dataclasses import fields
from pathlib import Path

import yaml

from mars_ray.errors import ConfigError
from mars_ray.machines.step_model import StepModel

STEP_MODELS = {
    model.name: model
    for model in (
        StepModel("h200/qwen2.5-7b", 15.2e9, 57_344, 4.8e12, 989e12, 15.2e9, 0.77, 0.001),
        StepModel("l4/qwen2.5-0.5b", 0.99e9, 12_288, 0.30e12, 121e12, 0.98e9, 0.77, 0.001),
    )
}


def step_model(name: str) -> StepModel:
    """Return the step model called `name`, or the one in the YAML file at that path. Raises `ConfigError`."""
    if name in STEP_MODELS:
        return STEP_MODELS[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"machine is {name!r}; known are {', '.join(STEP_MODELS)}, or give a YAML file.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    return _checked(path, content)


def _checked(path: Path, content: object) -> StepModel:
    names = [field.name for field in fields(StepModel)]
    known = f"Known are {', '.join(names)}."
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {content!r}, must be a mapping of fields. {known}")
    for name in content:
        if name not in names:
            raise ConfigError(f"{path}: unknown field {name!r}. {known}")
    for name in names:
        value = content.get(name)
        if name == "name":
            if not (isinstance(value, str) and value and value.isascii() and value.isprintable()):
                raise ConfigError(f"{path}: name is {value!r}, must be printable ASCII characters.")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{path}: {name} is {value!r}, must be a number above 0.")
    if content["efficiency"] > 1:
        raise ConfigError(f"{path}: efficiency is {content['efficiency']}, must be at most 1.")
    return StepModel(**content)

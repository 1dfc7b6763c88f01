"""Compare the names in a file with the pydantic model that will read it.

Ray Serve's models accept unknown names and drop them; this check refuses them. It never looks at a value.
"""

from typing import Any, get_args

from pydantic import BaseModel

from mars_ray.errors import ConfigError


def check_names(model: type[BaseModel], fields: Any, source: str, place: str = "") -> None:
    """Raise a `ConfigError` for the first name in `fields`, at any depth, that `model` does not know."""
    where, known = f"{source}: {place}" if place else source, ", ".join(model.model_fields)
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is {fields!r}; give fields. Known are {known}.")
    for name, value in fields.items():
        if name not in model.model_fields:
            raise ConfigError(f"{where}: unknown field {name!r}. Known are {known}.")
        inner, below = _model_in(model.model_fields[name].annotation), f"{place}.{name}" if place else name
        if inner and isinstance(value, dict):
            check_names(inner, value, source, below)
        if inner and isinstance(value, list):
            for number, each in enumerate(value):
                check_names(inner, each, source, f"{below}[{number}]")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation such as `Optional[List[Model]]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)

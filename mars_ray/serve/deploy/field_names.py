"""Compare the names in a file with the pydantic model or dataclass that will read it.

Ray Serve's models accept unknown names and drop them; this check refuses them. It never looks at a value.
"""

from typing import Any, get_args

from pydantic import BaseModel
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from mars_ray.errors import ConfigError


def check_names(model: type, fields: Any, source: str, place: str = "") -> None:
    """Raise a `ConfigError` for the first name in `fields`, at any depth, that `model` does not know."""
    model_fields = _fields_of(model)
    assert model_fields is not None, f"{model.__name__} is no pydantic class"
    where = f"{source}: {place}" if place else source
    known = ", ".join(model_fields)
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is {fields!r}; give fields. Known are {known}.")
    for name, value in fields.items():
        if name not in model_fields:
            raise ConfigError(f"{where}: unknown field {name!r}. Known are {known}.")
        inner = _model_in(model_fields[name].annotation)
        below = f"{place}.{name}" if place else name
        if inner and isinstance(value, dict):
            check_names(inner, value, source, below)
        if inner and isinstance(value, list):
            for number, item in enumerate(value):
                check_names(inner, item, source, f"{below}[{number}]")


def _fields_of(model: Any) -> dict[str, FieldInfo] | None:
    """Return the fields of a pydantic model or dataclass, None for any other type."""
    if not isinstance(model, type):
        return None
    if issubclass(model, BaseModel):
        return model.model_fields
    return model.__pydantic_fields__ if is_pydantic_dataclass(model) else None


def _model_in(annotation: Any) -> type | None:
    """Return the pydantic class in an annotation such as `Optional[List[Model]]`."""
    if _fields_of(annotation) is not None:
        model: type = annotation
        return model
    return next(filter(None, map(_model_in, get_args(annotation))), None)

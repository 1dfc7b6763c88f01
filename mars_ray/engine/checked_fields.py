"""Check the fields of option classes by their annotations, and convert values that mean the same.

Where a list is expected, a single text, path or number counts as a list of one. Lists, generators and arrays become
tuples, and NumPy scalars become numbers. Everything else must have the annotated type: "3" is not a number.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, InstanceOf, PlainValidator, ValidationError, create_model

from mars_ray.errors import ConfigError, problems_of
from mars_ray.model.resolve import as_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def items_of(value: object) -> list[Any] | None:
    """Return the items of a list, tuple, generator, array, tensor or Series, or None for a single value.

    Texts, bytes, mappings, models and tables are single values. So are sets, because they have no order.
    """
    if isinstance(value, str | bytes | bytearray | Mapping | Set | BaseModel):
        return None
    if hasattr(value, "as_py"):  # a cell of an Arrow table
        return items_of(value.as_py())
    if hasattr(value, "chunks") and hasattr(value, "to_pylist"):  # a column of an Arrow table
        return list(value.to_pylist())
    to_list: Callable[[], object] | None = getattr(value, "tolist", None)
    if callable(to_list):  # arrays of NumPy, Arrow and torch, and Series of pandas
        value = to_list()
    elif getattr(value, "ndim", 1) != 1:  # a table of pandas
        return None
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else None


def as_tuple(value: object) -> tuple[Any, ...]:
    """Return several items, or the only item, as a tuple."""
    items = items_of(value)
    return (value,) if items is None else tuple(items)


def _texts(value: object) -> tuple[str, ...]:
    items = tuple(map(as_name, as_tuple(value)))
    if not all(isinstance(item, str) for item in items):
        raise ValueError("must be a text or path, or a list of them")
    return cast(tuple[str, ...], items)


def _numbers(value: object) -> tuple[float, ...]:
    items = as_tuple(value)
    if not all(isinstance(item, Real) and not isinstance(item, bool) for item in items):
        raise ValueError("must be a number, or a list of numbers")
    return tuple(map(float, items))


Texts = Annotated[tuple[str, ...], PlainValidator(_texts)]
"""Texts or paths. A single one counts as a list of one."""
Numbers = Annotated[tuple[float, ...], PlainValidator(_numbers)]
"""Numbers. A single one counts as a list of one."""


def set_plain_numbers(options: "DataclassInstance") -> None:
    """Replace NumPy scalars in the fields of a frozen dataclass with Python's numbers."""
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(options, field.name, value.item())


def check_fields(options: "DataclassInstance") -> None:
    """Convert every field of a frozen dataclass to its annotated type.

    Raises `ConfigError`, which names each wrong field, its value, and what it must be.
    """
    set_plain_numbers(options)
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    try:
        checked = _model_of(type(options)).model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{problems_of(error)}.") from None
    for name in values:
        object.__setattr__(options, name, getattr(checked, name))


@cache
def _model_of(kind: "type[DataclassInstance]") -> type[BaseModel]:
    """Return a model with the fields of a dataclass. Its values must be of the annotated types already."""
    hints = get_type_hints(kind, include_extras=True)
    instance_of: Any = InstanceOf  # mypy takes only types that it knows
    types: dict[str, Any] = {
        name: (instance_of[hint] if is_dataclass(hint) else hint, ...) for name, hint in hints.items()
    }
    config = ConfigDict(strict=True, arbitrary_types_allowed=True, protected_namespaces=())
    return create_model(kind.__name__, __config__=config, **types)

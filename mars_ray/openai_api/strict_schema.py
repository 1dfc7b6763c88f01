"""Close the objects of a JSON schema, as `strict: true` demands.

In:    a schema whose objects may say nothing about properties that they do not list.
Out:   the same schema, in which these objects allow no other properties.
Never: changes `additionalProperties` where the schema has it, or which properties are required.

OpenAI refuses a strict schema without `additionalProperties: false`, and its Python client adds that where a schema
says nothing. A schema that leaves the type of a value open still allows any value.
"""

from collections.abc import Mapping
from typing import Any

from mars_ray.errors import RequestError

BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is an object of schemas."""

INSIDE = ("items", "prefixItems", "additionalItems", "additionalProperties")
"""Keywords whose value is a schema, or a list of schemas, for elements or properties of the described value."""

IN_PLACE = ("anyOf", "oneOf", "allOf")
"""Keywords whose value is a list of schemas for the described value itself."""

CONDITIONAL = ("if", "then", "else", "not", "dependentSchemas")
"""Keywords whose schemas hold for some values only. They may list properties that other values must not have."""

OF_OBJECTS = frozenset(("properties", "patternProperties", "required", "minProperties", "maxProperties"))
"""Keywords that show that a schema without a type describes objects."""


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with all its objects closed. Raises `RequestError` for an object that cannot be closed."""
    try:
        closed: dict[str, Any] = _closed(schema)
    except RecursionError:
        raise RequestError("the schema is nested too deeply.") from None
    return closed


def _closed(schema: Any, outer_type: Any = None) -> Any:
    """Return a schema with its objects closed. A schema without a type has the type of the schema around it."""
    closed = _closed_inside(schema)
    if not isinstance(schema, Mapping) or schema.keys() & {"additionalProperties", "enum", "const"}:
        return closed
    kind = schema.get("type", outer_type)
    own = schema.get("properties", {}) if isinstance(schema.get("properties", {}), Mapping) else {}
    lists_own = bool(schema.keys() & {"properties", "patternProperties"})
    places = [name for name in IN_PLACE if name in schema]
    parts = _parts(schema)
    if not lists_own and parts and (places in (["anyOf"], ["oneOf"]) or (places == ["allOf"] and len(parts) == 1)):
        # The object is closed in each alternative, because they list different properties.
        return closed | {places[0]: [_closed(part, kind) for part in parts]}
    if "$ref" in schema and not lists_own and not parts:
        return closed  # the schema that it refers to is closed under its own keyword, such as $defs
    if "$ref" in schema or schema.keys() & set(CONDITIONAL) or any(_lists_more(part, own) for part in parts):
        raise RequestError(
            "strict needs all properties of an object in one schema, but this one has some in allOf, anyOf, oneOf, "
            "$ref or a condition. Merge them, set additionalProperties, or leave strict out."
        )
    if (
        kind == "object"
        or (isinstance(kind, list) and "object" in kind)
        or (kind is None and schema.keys() & OF_OBJECTS)
    ):
        closed["additionalProperties"] = False
    return closed


def _closed_inside(schema: Any) -> Any:
    """Return a schema whose objects are closed except for the outermost one."""
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name in BY_NAME:
        if isinstance(schemas := schema.get(name), Mapping):
            closed[name] = {key: _closed(value) for key, value in schemas.items()}
    for name in INSIDE:
        if name in schema:
            value = schema[name]
            closed[name] = [_closed(item) for item in value] if isinstance(value, list) else _closed(value)
    for name in IN_PLACE:
        if isinstance(parts := schema.get(name), list):
            closed[name] = [_closed_inside(part) for part in parts]
    return closed


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas that describe the same value as `schema`, which refers to them or holds them."""
    return [part for name in IN_PLACE if isinstance(parts := schema.get(name), list) for part in parts]


def _lists_more(part: Any, own: Mapping[str, Any]) -> bool:
    """Return whether a part of a schema lists, or may list, other properties than its own ones."""
    if not isinstance(part, Mapping):
        return False
    properties = part.get("properties", {})
    if part.keys() & {"$ref", "patternProperties"} or not isinstance(properties, Mapping) or properties.keys() - own:
        return True
    return any(_lists_more(inner, own) for inner in _parts(part))

"""Turn the validation errors of pydantic into one error that names the field.

The error never names a branch of a union type, because such names do not occur in the body, and quotes at most
`NAME_CHARS` characters of a name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mars_ray.errors import RequestError

NAME_CHARS = 80
"""Maximum characters that an error quotes from a caller's input, such as the name of an unknown field."""

KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "int_parsing": "a whole number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""The required kind of value, keyed by pydantic's type of error."""

FieldPath = tuple[str, ...]
"""Names and indices that lead from the body to a value in it."""


def validation_error(errors: Sequence[Any], body: object) -> RequestError:
    """Return the error for the first invalid field of `body`.

    If a field may be of several types, pydantic reports errors for each of them. The error returned is for the type
    that matched the value most deeply, because that error is the most helpful.
    """
    paths = [_path(error, body) for error in errors]
    field = paths[0][:1]
    depth = max(len(path) for path in paths if path[:1] == field)
    deepest = next(path for path in paths if path[:1] == field and len(path) == depth)
    same = [error for error, path in zip(errors, paths, strict=True) if path == deepest]
    name = field_path(deepest)
    param = deepest[0][:NAME_CHARS] if deepest else None
    if same[0]["type"] == "extra_forbidden":
        return RequestError(f"unknown parameter {name!r}.", param=param, code="unknown_parameter")
    if same[0]["type"] == "value_error":
        return RequestError(f"{same[0]['ctx']['error']}.", param=param)
    kinds = list(dict.fromkeys(KINDS[error["type"]] for error in same if error["type"] in KINDS))
    if kinds and any(error["type"] == "too_short" for error in same):
        return RequestError(f"{name} is empty; it must be {_either(kinds)}, or have at least 1 item.", param=param)
    if kinds:
        return RequestError(f"{name} must be {_either(kinds)}.", param=param)
    return RequestError(f"{name} {_reason(same[0])}.", param=param)


def field_path(path: FieldPath) -> str:
    """Return a path in a body in the form used in error messages, such as `messages.0.content`."""
    if not path:
        return "the body"
    name = ".".join(path)
    return name if len(name) <= NAME_CHARS else f"{name[:NAME_CHARS]}…"


def _path(error: Any, body: object) -> FieldPath:
    """Return the path of an error: the parts of pydantic's location that exist in the body, or the query parameter."""
    if error["loc"][:1] == ("query",):
        return tuple(map(str, error["loc"][1:]))
    path: list[str] = []
    for part in error["loc"]:
        if _leads_into(body, part):
            body = body[part]  # type: ignore[index]
        elif error["type"] != "missing" or part is not error["loc"][-1]:
            continue  # skip "body" and the name of a union branch
        path.append(str(part))
    return tuple(path)


def _leads_into(value: object, part: str | int) -> bool:
    if isinstance(value, Mapping):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _reason(error: Any) -> str:
    match error["type"]:
        case "missing":
            return "is missing"
        case "union_tag_not_found":
            return f"needs {error['ctx']['discriminator']}"
        case "union_tag_invalid":
            tag = f"{error['ctx']['discriminator']} {error['ctx']['tag'][:NAME_CHARS]!r}"
            return f"has the unknown {tag}; use one of {error['ctx']['expected_tags']}"
        case "too_short":
            return f"must have at least {error['ctx']['min_length']} item"
        case "too_long":
            return f"must have at most {error['ctx']['max_length']} items"
    message: str = error["msg"]
    for prefix in ("Input should be ", "Input should "):
        if message.startswith(prefix):
            return f"must {'be ' if prefix.endswith('be ') else ''}{message.removeprefix(prefix)}"
    return f"is not valid: {message[:1].lower()}{message[1:]}"


def _either(kinds: Sequence[str]) -> str:
    return kinds[0] if len(kinds) == 1 else f"{', '.join(kinds[:-1])} or {kinds[-1]}"

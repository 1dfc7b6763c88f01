"""Turn the validation errors of pydantic into one error of this API that names the field.

It never names a branch of a union type, which is no part of the body, and quotes at most `NAME_CHARS` of a name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mars_ray.openai_api.api_error import ApiError

NAME_CHARS = 80
"""Characters that an error quotes of what a caller chose, such as the name of an unknown field."""

KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""What a value must be instead, by pydantic's type of error."""

Place = tuple[str, ...]


def validation_error(errors: Sequence[Any], body: object) -> ApiError:
    """Return the 400 for the first thing that is wrong with `body`.

    A field may be of several types; the errors of that type tell most which got furthest into the value.
    """
    places = [_place(error, body) for error in errors]
    field = places[0][:1]
    deepest = max(len(place) for place in places if place[:1] == field)
    place = next(place for place in places if place[:1] == field and len(place) == deepest)
    same = [error for error, where in zip(errors, places, strict=True) if where == place]
    name, param = field_path(place), place[0][:NAME_CHARS] if place else None
    if same[0]["type"] == "extra_forbidden":
        return ApiError.bad_request(f"unknown parameter {name!r}.", param, "unknown_parameter")
    if same[0]["type"] == "value_error":
        return ApiError.bad_request(f"{same[0]['ctx']['error']}.", param)
    kinds = list(dict.fromkeys(KINDS[error["type"]] for error in same if error["type"] in KINDS))
    if kinds:
        return ApiError.bad_request(f"{name} must be {_either(kinds)}.", param)
    return ApiError.bad_request(f"{name} {_reason(same[0])}.", param)


def field_path(place: Place) -> str:
    """Return a place in a body as an error names it, such as `messages.0.content`."""
    if not place:
        return "the body"
    name = ".".join(place)
    return name if len(name) <= NAME_CHARS else f"{name[:NAME_CHARS]}…"


def _place(error: Any, body: object) -> Place:
    """Return where in the body an error is: of what pydantic names, the parts that lead somewhere there."""
    place: list[str] = []
    for part in error["loc"]:
        if _leads_into(body, part):
            body = body[part]  # type: ignore[index]
        elif error["type"] != "missing" or part is not error["loc"][-1]:
            continue  # "body", or the name of a type that was tried
        place.append(str(part))
    return tuple(place)


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
            asked = f"{error['ctx']['discriminator']} {error['ctx']['tag'][:NAME_CHARS]!r}"
            return f"has the unknown {asked}; known are {error['ctx']['expected_tags']}"
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

"""Refuse text that is no Unicode: JSON can spell half of a surrogate pair, which no tokenizer takes."""

from collections.abc import Iterator
from typing import Any

from mars_ray.chat.validation_errors import NAME_CHARS, field_path
from mars_ray.errors import RequestError


def refuse_lone_surrogates(value: Any) -> None:
    """Raise `RequestError` if a text or a name in a JSON value holds half of a surrogate pair."""
    if match := _lone_surrogate(value):
        path, surrogate = match
        code = ascii(surrogate).strip("'")
        raise RequestError(
            f"{field_path(path)} holds {code}, which is only half of a surrogate pair. Send both halves or neither.",
            param=path[0][:NAME_CHARS] if path else None,
        )


def _lone_surrogate(value: Any) -> tuple[tuple[str, ...], str] | None:
    """Return the path to a lone surrogate in a JSON value, and the surrogate; None if there is no lone surrogate.

    If the surrogate is in the name of a field, the path leads to the object with that field.
    """
    path: list[str | int] = []
    levels: list[Iterator[tuple[str | int, Any]]] = [iter([("", value)])]
    # Use a loop instead of recursion, because a body may be nested as deeply as the interpreter's limit allows. Keep
    # only one path, because a body may have many items at the deepest level.
    while levels:
        for name, item in levels[-1]:
            if isinstance(name, str) and (surrogate := _surrogate_in(name)):
                return tuple(map(str, path[1:])), surrogate
            if isinstance(item, str):
                if surrogate := _surrogate_in(item):
                    return tuple(map(str, [*path, name][1:])), surrogate
            elif isinstance(item, dict | list) and item:
                path.append(name)
                levels.append(iter(item.items()) if isinstance(item, dict) else enumerate(item))
                break
        else:
            levels.pop()
            del path[-1:]
    return None


def _surrogate_in(text: str) -> str | None:
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None

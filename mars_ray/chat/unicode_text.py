"""Refuse text that is no Unicode: JSON can spell half of a surrogate pair, which no tokenizer takes.

`data.arrow_json` marks values that were bytes with such halves, because no valid text contains them.
"""

from collections.abc import Iterator
from typing import Any

from mars_ray.chat.validation_errors import NAME_CHARS, field_path
from mars_ray.errors import RequestError

BYTES = "\udfff\udbff"
"""Mark before the base64 text of bytes that are not UTF-8: halves of surrogate pairs in the wrong order."""
BLOB = "\udfff\udbfe"
"""Mark before the digest that replaces bytes that are too many to keep, such as an image."""


def text_fault(text: str) -> str | None:
    """Return the part of a text that is not valid Unicode, in words; None if the text is valid."""
    if _surrogate_in(text) is None:
        return None
    return "bytes that are not UTF-8 text" if BYTES in text or BLOB in text else "half of a surrogate pair"


def refuse_lone_surrogates(value: Any) -> None:
    """Raise `RequestError` if a text or a name in a JSON value holds half of a surrogate pair."""
    if match := _invalid_text(value):
        path, text = match
        param = path[0][:NAME_CHARS] if path else None
        if BYTES in text or BLOB in text:
            raise RequestError(f"{field_path(path)} holds bytes that are not UTF-8 text.", param=param)
        code = ascii(_surrogate_in(text)).strip("'")
        raise RequestError(
            f"{field_path(path)} holds {code}, which is only half of a surrogate pair. Send both halves or neither.",
            param=param,
        )


def _invalid_text(value: Any) -> tuple[tuple[str, ...], str] | None:
    """Return the path to a text with a lone surrogate in a JSON value, and the text; None if there is none.

    If the text is the name of a field, the path leads to the object with that field.
    """
    path: list[str | int] = []
    levels: list[Iterator[tuple[str | int, Any]]] = [iter([("", value)])]
    # Use a loop instead of recursion, because a body may be nested as deeply as the interpreter's limit allows. Keep
    # only one path, because a body may have many items at the deepest level.
    while levels:
        for name, item in levels[-1]:
            if isinstance(name, str) and _surrogate_in(name):
                return tuple(map(str, path[1:])), name
            if isinstance(item, str):
                if _surrogate_in(item):
                    return tuple(map(str, [*path, name][1:])), item
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

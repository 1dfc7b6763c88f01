"""Read tool calls that are written as Python: `[get_weather(city="Paris", days=2), now()]`."""

import ast
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

_NAME = re.compile(r"[\w.-]+")
"""Name of an argument. Keywords of Python, such as `from`, are names too."""

_TOKEN = re.compile(r"""\"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|[()\[\]{},]""", re.DOTALL)
"""A string, a bracket or a comma."""

_NAMES = {"true": True, "false": False, "null": None}


def read_calls(text: str) -> list[tuple[str, str]] | None:
    """Return the name and the JSON arguments of each call in the items of a list; None if an item is no call.

    Values are literals of Python or of JSON. Names of functions may hold dots and hyphens.
    """
    calls: list[tuple[str, str]] = []
    for item in _items(text):
        name, bracket, rest = item.strip().partition("(")
        arguments = _arguments(rest[:-1]) if bracket and name and rest.endswith(")") else None
        if arguments is None:
            return None
        calls.append((name.strip(), arguments))
    return calls


def _items(text: str) -> Iterator[str]:
    """Split the items of a list at its commas."""
    depth = 0
    start = 0
    for token in _TOKEN.finditer(text):
        if token[0] in tuple("([{"):
            depth += 1
        elif token[0] in tuple(")]}"):
            depth -= 1
        elif token[0] == "," and not depth:
            yield text[start : token.start()]
            start = token.end()
    yield text[start:]


def _arguments(text: str) -> str | None:
    """Return keyword arguments as a JSON object; None if a value is no literal or has no name."""
    items = [item.strip() for item in _items(text)]
    if not items[-1]:  # no arguments, or a comma after the last
        items.pop()
    pairs: list[str] = []
    try:
        for item in items:
            name, equals, value = item.partition("=")
            if not equals or not _NAME.fullmatch(name.strip()):
                return None
            pairs.append(f"{json.dumps(name.strip())}: {_value(value.strip())}")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return "{" + ", ".join(pairs) + "}"


def _value(text: str) -> str:
    """Return the JSON text of a value. A value in JSON is kept as it is. Raises an error if the value is not a
    literal."""
    try:
        json.loads(text, parse_constant=_refuse)
        return text
    except ValueError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # strings may hold escapes that Python does not know
            node = ast.parse(text, mode="eval").body
        return json.dumps(_literal(node), ensure_ascii=False, allow_nan=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) if key else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("the keys of an object are text")
            return dict(zip(names, map(_literal, values), strict=True))
    raise ValueError("no literal")

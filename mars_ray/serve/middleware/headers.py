"""The headers of a request as they came: bytes, in any case, possibly repeated, possibly garbage.

In:    an ASGI scope.
Out:   all values of a name; the size of the whole.
Never: decodes, so nothing in them can raise.
"""

from starlette.types import Scope

Headers = list[tuple[bytes, bytes]]


def headers_of(scope: Scope) -> Headers:
    """Return names in lower case, as ASGI promises and not every server keeps, with their values."""
    return [(bytes(name).lower(), bytes(value).strip(b" \t")) for name, value in scope["headers"]]


def values(headers: Headers, name: bytes) -> list[bytes]:
    """Return every value of `name`. A caller that needs one must say what two mean."""
    return [value for each, value in headers if each == name]


def head_bytes(scope: Scope) -> int:
    """Return the size of path, query and headers on the wire; a line adds a colon, a space and two for its end."""
    lines = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") + lines

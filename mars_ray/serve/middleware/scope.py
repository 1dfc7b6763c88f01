"""The path and the headers of a request as they came: bytes, in any case, possibly repeated, possibly garbage.

In:    an ASGI scope.
Out:   all values of a header; the path that the router will look at, whether it needs a key, and the role it needs.
Never: decodes a header, so nothing in it can raise; normalizes a path. Every path that is not literally an open path
       needs a key, so no spelling of a path slips through.
"""

from starlette.types import Scope

from mars_ray.serve.middleware.api_keys import Role

Headers = list[tuple[bytes, bytes]]


def headers_of(scope: Scope) -> Headers:
    """Return the headers with names in lower case, which ASGI requires and some servers omit."""
    return [(bytes(name).lower(), bytes(value).strip(b" \t")) for name, value in scope["headers"]]


def values(headers: Headers, name: bytes) -> list[bytes]:
    """Return every value of the header `name`."""
    return [value for each, value in headers if each == name]


def head_bytes(scope: Scope) -> int:
    """Return the size of path, query and headers on the wire; a line adds a colon, a space and two for its end."""
    lines = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") + lines


OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/ping"})
"""Paths without a key: Kubernetes' names, and those by which clients of vLLM and SGLang ask whether an engine is up."""

TOKENIZER_PATHS = frozenset({"/tokenize", "/detokenize"})
"""Paths that use only the tokenizer."""

USE_PATHS = TOKENIZER_PATHS | {"/openapi.json", "/version"}
"""Paths outside /v1/ that need only the role `use`."""


def routed_path(scope: Scope) -> str:
    """Return the path that Starlette's router matches: decoded, without the root path of the mount."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def is_open(scope: Scope, open_paths: frozenset[str]) -> bool:
    """Return whether the request needs no key: the routed path and the raw path must both be open.

    The two differ for an encoded path such as /%68ealthz. The Host header, of which URLs are rebuilt, has no say.
    """
    raw = scope.get("raw_path")
    return routed_path(scope) in open_paths and (raw is None or raw == scope["path"].encode(errors="replace"))


def role_of_path(path: str) -> Role:
    """Return `use` below /v1/ and for `USE_PATHS`, `operate` everywhere else.

    Naming what is free to use, not what is not: a list of operators' paths would miss the spellings that a router
    takes for the same path, such as a line feed at its end.
    """
    return "use" if path.startswith("/v1/") or path in USE_PATHS else "operate"

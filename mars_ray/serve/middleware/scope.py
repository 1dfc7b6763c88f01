"""The path and the headers of a request as they arrive: bytes in any letter case, possibly repeated, possibly garbage.

In:    an ASGI scope.
Out:   all values of a header; the path that the router matches, whether this path needs a key, and which role it needs.
Never: decodes a header, so that no header can raise an error; normalizes a path. Every path that is not literally an
       open path needs a key, so that no spelling of a path gets around the check.
"""

from starlette.types import Scope

from mars_ray.serve.middleware.api_keys import Role

Headers = list[tuple[bytes, bytes]]


def headers_of(scope: Scope) -> Headers:
    """Return the headers with lower-case names. ASGI requires lower case, but some servers do not convert the names."""
    return [(bytes(name).lower(), bytes(value).strip(b" \t")) for name, value in scope["headers"]]


def values(headers: Headers, name: bytes) -> list[bytes]:
    """Return every value of the header `name`."""
    return [value for key, value in headers if key == name]


def head_bytes(scope: Scope) -> int:
    """Return the size of the path, the query and the headers on the wire. Each header line adds 4 bytes of
    separators."""
    lines = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") + lines


OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/ping"})
"""Paths that need no key: the health checks of Kubernetes, and those of vLLM's and SGLang's clients."""

TOKENIZER_PATHS = frozenset({"/tokenize", "/detokenize"})
"""Paths that use only the tokenizer."""

USE_PATHS = TOKENIZER_PATHS | {"/openapi.json", "/version"}
"""Paths outside /v1/ that need only the role `use`."""


def routed_path(scope: Scope) -> str:
    """Return the path that Starlette's router matches: decoded, without the root path of the mount."""
    path = str(scope["path"])
    root = str(scope.get("root_path") or "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def is_open(scope: Scope, open_paths: frozenset[str]) -> bool:
    """Return whether the request needs no key: the routed path and the raw path must both be open.

    The two differ for an encoded path such as /%68ealthz. The Host header, which URLs are rebuilt from, is ignored.
    """
    raw = scope.get("raw_path")
    return routed_path(scope) in open_paths and (raw is None or raw == scope["path"].encode(errors="replace"))


def role_of_path(path: str) -> Role:
    """Return `use` below /v1/ and for `USE_PATHS`, `operate` everywhere else.

    If the operators' paths were listed instead, the list would miss spellings that a router treats as the same path,
    such as one with a line feed at its end.
    """
    return "use" if path.startswith("/v1/") or path in USE_PATHS else "operate"

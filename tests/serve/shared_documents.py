"""One OpenAPI document for all apps with the same routes: building one takes most of a second."""

from typing import Any

from fastapi import FastAPI, routing

_build = FastAPI.openapi
_documents: dict[tuple[Any, ...], dict[str, Any]] = {}


def share_documents() -> None:
    """Let each later app of this process share its document with those of the same routes."""
    FastAPI.openapi = _document  # type: ignore[method-assign]


def _document(self: FastAPI) -> dict[str, Any]:
    if not self.openapi_schema:
        routes = _routes(self)
        key = (self.title, *((path, *sorted(getattr(route, "methods", ())), _name(route)) for path, route in routes))
        if key not in _documents:
            _documents[key] = _build(self)
        self.openapi_schema = _documents[key]
    return self.openapi_schema


def _routes(app: FastAPI) -> list[tuple[str, Any]]:
    contexts: Any = getattr(routing, "iter_route_contexts", None)
    if contexts:  # this FastAPI keeps included routers whole; that of ray[llm] copies their routes
        return [(route.path, route.original_route) for route in contexts(app.routes)]
    routes: list[Any] = app.routes
    return [(route.path, route) for route in routes]


def _name(route: Any) -> str:
    """Return the name of the function that answers, with its module."""
    endpoint = getattr(route, "endpoint", route)
    return f"{endpoint.__module__}.{getattr(endpoint, '__qualname__', '')}"

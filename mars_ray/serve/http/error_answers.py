"""Answer errors in the form of the API that was called.

In:    a FastAPI app, exceptions that its routes raise.
Out:   responses with a status and an error that says what to do.
Never: shows a traceback to a caller.
"""

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from mars_ray.chat.validation_errors import validation_error
from mars_ray.errors import MarsRayError
from mars_ray.openai_api.api_error import ApiError, api_error, internal_error
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.middleware.scope import role_of_path


def add_error_handlers(app: FastAPI, retry_after_s: Callable[[], int]) -> None:
    """Add a handler for each kind of error to `app`; `retry_after_s` returns the seconds until a retry."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return _response(request, error)

    @app.exception_handler(MarsRayError)
    async def failed(request: Request, error: MarsRayError) -> Response:
        request_id = Exchange.of(request.scope).request_id
        return _response(request, api_error(error, request_id=request_id, retry_after_s=retry_after_s()))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _response(request, api_error(validation_error(error.errors(), error.body)))

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        # Starlette raises this for an unknown path, a wrong method and a body that is not text.
        headers = {"allow": ", ".join(_allowed_methods(request))} if error.status_code == 405 else error.headers
        refusal = ApiError(error.status_code, f"{error.detail}.", type="invalid_request_error", headers=headers)
        if error.status_code == 404:
            refusal = ApiError(404, _not_served(request.app), type="invalid_request_error", code="unknown_url")
        return _response(request, refusal)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # only for the log, because the client has disconnected

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _error: Exception) -> Response:
        return _response(request, internal_error(Exchange.of(request.scope).request_id))


def _response(request: Request, error: ApiError) -> Response:
    exchange = Exchange.of(request.scope)
    exchange.code = error.code
    body = exchange.api.body(error, exchange.request_id)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


def _not_served(app: FastAPI) -> str:
    """Return the message of a 404. It lists the served paths because clients may try OpenAI's other APIs."""
    paths = [path for path in app.openapi()["paths"] if "{" not in path and role_of_path(path) == "use"]
    return f"nothing is served at this path. This server has {', '.join(paths)}; /openapi.json describes them."


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes of a path, because Starlette's error has those of the first route alone."""
    allowed = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(route.matches({**request.scope, "method": method})[0] == Match.FULL for route in request.app.routes)
    ]
    return ["GET", "HEAD", *allowed[1:]] if "GET" in allowed else allowed

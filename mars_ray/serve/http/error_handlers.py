"""Give every error that arises inside the FastAPI app OpenAI's form."""

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from mars_ray.errors import MarsRayError
from mars_ray.openai_api.api_error import ApiError, api_error, internal_error
from mars_ray.openai_api.validation_errors import validation_error
from mars_ray.serve.middleware.exchange import Exchange

NOT_SERVED = (
    "nothing is served at this path. This server has /v1/chat/completions, /v1/completions, /v1/models, /tokenize and "
    "/detokenize; /openapi.json describes them."
)
"""It names no path that was asked for: clients of OpenAI's other APIs see what there is instead."""


def add_error_handlers(app: FastAPI, retry_after_s: Callable[[], int]) -> None:
    """Add a handler for each kind of error to `app`; `retry_after_s` says when to try again."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return _response(request, error)

    @app.exception_handler(MarsRayError)
    async def failed(request: Request, error: MarsRayError) -> Response:
        request_id = Exchange.of(request.scope).request_id
        return _response(request, api_error(error, request_id=request_id, retry_after_s=retry_after_s()))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _response(request, validation_error(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        # What Starlette raises itself: no such path, method not allowed, a body that is no text.
        found = ApiError(error.status_code, f"{error.detail}.", type="invalid_request_error", headers=error.headers)
        if error.status_code == 404:
            found = ApiError(404, NOT_SERVED, type="invalid_request_error", code="unknown_url")
        return _response(request, found)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # for the log: nobody reads it

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _error: Exception) -> Response:
        return _response(request, internal_error(Exchange.of(request.scope).request_id))


def _response(request: Request, error: ApiError) -> Response:
    Exchange.of(request.scope).code = error.code
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

"""The HTTP front: routes, and how their errors look. A plain ASGI app, whatever runs it.

In:    an `Endpoint`, a `Control`, a way to gather metrics.
Out:   an ASGI app that speaks OpenAI's API; the door (`guard`) belongs in front of it.
Never: imports Ray.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from openai.types.chat.chat_completion import ChatCompletion
from openai.types.completion import Completion
from openai.types.model import Model
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response

from mars_ray.errors import MarsRayError, UnavailableError
from mars_ray.openai_api.api_error import ApiError, api_error, internal_error
from mars_ray.openai_api.field_errors import refusal
from mars_ray.openai_api.model_facts import ModelFacts
from mars_ray.openai_api.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
)
from mars_ray.serve.http.control_routes import Control, control_routes
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.middleware.json_body import JsonRoute


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Body of every answer that is not a success."""

    error: ErrorObject


class ModelList(BaseModel):
    """Answer of `/v1/models`."""

    object: str = "list"
    data: list[Model]


class Version(BaseModel):
    """Answer of `/version`."""

    version: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 403, 404, 405, 408, 413, 415, 421, 429, 431, 500, 503)
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Whole, or as a stream."}
}


def make_app(
    endpoint: Endpoint,
    control: Control,
    metrics: Callable[[], Awaitable[str]],
    *,
    retry_after_s: Callable[[], int] = lambda: 1,
) -> FastAPI:
    """Return the app. What the endpoint needs runs as long as the app does."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with endpoint.running():
            yield

    app = FastAPI(
        title="mars-ray",
        version=version("mars-ray"),
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name us by whatever the Host header says
        responses=ERRORS,
    )
    app.router.route_class = JsonRoute
    _handle_errors(app, retry_after_s)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await endpoint.chat(body, request)

    @app.post("/v1/completions", response_model=Completion, responses=STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await endpoint.complete(body, request)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[_model(await endpoint.facts())])

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Model:
        return _model(await endpoint.check_model(model))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeReply:
        return await endpoint.tokenize(body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeReply:
        return await endpoint.detokenize(body)

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """Alive: this process answers."""
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> Response:
        """Ready: a request sent now would be served."""
        ready = await endpoint.client.ready()
        return PlainTextResponse("ready" if ready else "not ready", status_code=200 if ready else 503)

    @app.get("/health", response_class=Response)
    @app.get("/ping", response_class=Response)
    async def health() -> Response:
        """As vLLM and SGLang have it: an empty 200 while a request sent now would be served."""
        if not await endpoint.client.ready():
            raise UnavailableError("no engine is up. Try again later.")
        return Response()

    @app.get("/version")
    async def get_version() -> Version:
        """Which release answers."""
        return Version(version=version("mars-ray"))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        """Figures of this process and of every engine, as Prometheus reads them."""
        return Response(await metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    app.include_router(control_routes(control))
    app.openapi()  # takes a tenth of a second, which callers would wait for if it came with the first request for it
    return app


def _model(facts: ModelFacts) -> Model:
    return Model(
        id=facts.name,
        created=facts.created,
        object="model",
        owned_by="mars-ray",
        max_model_len=facts.engine.positions,
        block=facts.engine.block,
    )


def _handle_errors(app: FastAPI, retry_after_s: Callable[[], int]) -> None:
    """Give every error that arises inside the app OpenAI's form."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return _response(request, error)

    @app.exception_handler(MarsRayError)
    async def failed(request: Request, error: MarsRayError) -> Response:
        request_id = request.state.exchange.request_id
        return _response(request, api_error(error, request_id=request_id, retry_after_s=retry_after_s()))

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        return _response(request, refusal(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        # What Starlette raises itself: no such path, method not allowed, a body that is no text.
        kind = ApiError(error.status_code, f"{error.detail}.", type="invalid_request_error", headers=error.headers)
        return _response(request, kind)

    @app.exception_handler(ClientDisconnect)
    async def gone(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # for the log: nobody reads it

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, _error: Exception) -> Response:
        return _response(request, internal_error(request.state.exchange.request_id))


def _response(request: Request, error: ApiError) -> Response:
    request.state.exchange.code = error.code
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

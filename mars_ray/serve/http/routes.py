"""The routes of the API as a FastAPI app.

In:    the models of a gateway, a function that collects metrics.
Out:   an ASGI app that speaks OpenAI's API. It must be wrapped in `AccessMiddleware`.
Never: imports Ray.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from openai.types.chat.chat_completion import ChatCompletion
from openai.types.completion import Completion
from openai.types.model import Model
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.errors import UnavailableError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.openai_api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from mars_ray.serve.http.control_routes import control_routes
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.error_answers import add_error_handlers
from mars_ray.serve.http.extension import Extension
from mars_ray.serve.http.models import GatewayModels
from mars_ray.serve.middleware.exchange import Exchange, owner_of
from mars_ray.serve.middleware.json_body import JsonRoute
from mars_ray.serve.middleware.scope import routed_path
from mars_ray.web.pages import PAGES, POLICY, page, static_files


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every error response."""

    error: ErrorObject


class ModelList(BaseModel):
    """Response of `/v1/models`."""

    object: str = "list"
    data: list[Model]


class VersionResponse(BaseModel):
    """Response of `/version`."""

    version: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse}
    for status in (400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 429, 431, 500, 503)
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/event-stream": {
                "schema": {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
            }
        },
        "description": "The complete answer, or a stream of its chunks.",
    }
}


class HeadRequests:
    """Answers HEAD as GET without the body, because FastAPI's routes for GET refuse HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        if scope["type"] == "http" and scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, send_head)
        else:
            await self._app(scope, receive, send)


def make_app(
    models: GatewayModels,
    metrics: Callable[[str], Awaitable[tuple[bytes, str]]],
    extension: Extension,
    *,
    running: Callable[[], AbstractAsyncContextManager[None]],
    retry_after_s: Callable[[], int] = lambda: 1,
    web: bool = False,
) -> FastAPI:
    """Return the app, including the routes of the extension, and the web pages if `web` is set.

    `running` runs what the app needs, as long as the app runs.
    """
    app = FastAPI(
        title="mars-ray",
        version=version("mars-ray"),
        lifespan=lambda _app: running(),
        docs_url=None,  # FastAPI's documentation pages load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the name in the Host header
        responses=ERRORS,
    )
    app.add_middleware(HeadRequests)
    add_error_handlers(app, retry_after_s)
    app.include_router(openai_routes(models))
    app.include_router(health_routes(models.main, metrics))
    app.include_router(control_routes(models, extension.audit))
    for routes in extension.routes():
        app.include_router(routes)
    if web:
        app.include_router(web_routes())
    app.openapi()  # now, because building the schema on demand would make all callers wait 0.1 s
    return app


def openai_routes(models: GatewayModels) -> APIRouter:
    """Return the routes of OpenAI's API, and vLLM's routes for the tokenizer."""
    routes = APIRouter(route_class=JsonRoute, redirect_slashes=False)

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await (await endpoint_of(models, body.model, request)).chat(body, request)

    @routes.post("/v1/completions", response_model=Completion, responses=STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await (await endpoint_of(models, body.model, request)).complete(body, request)

    @routes.get("/v1/models")
    async def list_models(request: Request) -> ModelList:
        return ModelList(data=[_model(info) for info in await models.infos(owner_of(request))])

    @routes.get("/v1/models/{model:path}")
    async def get_model(model: str, request: Request) -> Model:
        return _model(await (await endpoint_of(models, model, request)).check_model(model))

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
        endpoint = await endpoint_of(models, body.model, request)
        return await endpoint.tokenize(body, Exchange.of(request.scope).key or "")

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
        endpoint = await endpoint_of(models, body.model, request)
        return await endpoint.detokenize(body, Exchange.of(request.scope).key or "")

    return routes


def health_routes(main: Endpoint, metrics: Callable[[str], Awaitable[tuple[bytes, str]]]) -> APIRouter:
    """Return the routes for health, version and metrics."""
    routes = APIRouter(route_class=JsonRoute, redirect_slashes=False)

    @routes.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """Return 200 if this process is alive."""
        return "ok"

    @routes.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> Response:
        """Return 200 if a request sent now would be served, and 503 otherwise."""
        obstacle = await main.client.obstacle()
        return PlainTextResponse(
            f"not ready: {obstacle}" if obstacle else "ready", status_code=503 if obstacle else 200
        )

    @routes.get("/health", response_class=Response)
    @routes.get("/ping", response_class=Response)
    async def health() -> Response:
        """Return an empty 200, like vLLM and SGLang, if a request sent now would be served."""
        if obstacle := await main.client.obstacle():
            raise UnavailableError(obstacle)
        return Response()

    @routes.get("/version")
    async def get_version() -> VersionResponse:
        """Return the release of this server."""
        return VersionResponse(version=version("mars-ray"))

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics(request: Request) -> Response:
        """Return the metrics of this process and of every engine, as Prometheus text or OpenMetrics text."""
        page, media_type = await metrics(request.headers.get("accept", ""))
        return Response(page, media_type=media_type)

    return routes


async def endpoint_of(models: GatewayModels, name: str | None, request: Request) -> Endpoint:
    """Return the endpoint that answers a request for a model."""
    return await models.find(name, owner_of(request))


def _model(model: ModelInfo) -> Model:
    return Model(
        id=model.name,
        created=model.created,
        object="model",
        owned_by="mars-ray",
        max_model_len=model.engine.max_model_len,
        block=model.engine.block,
        **({"notice": model.engine.notice} if model.engine.notice else {}),
    )


HEADERS = {"content-security-policy": POLICY, "referrer-policy": "no-referrer", "x-frame-options": "DENY"}


def web_routes() -> APIRouter:
    """Return one route per web page and static file."""
    routes = APIRouter(redirect_slashes=False, include_in_schema=False)

    async def get_page(request: Request) -> Response:
        file = page(routed_path(request.scope), str(request.scope.get("root_path") or ""))
        return Response(file.content, media_type=file.media_type, headers=HEADERS)

    async def get_file(request: Request) -> Response:
        file = static_files()[routed_path(request.scope)]
        return Response(file.content, media_type=file.media_type)

    for path in PAGES:
        routes.add_api_route(path, get_page, methods=["GET"])
    for path in static_files():
        routes.add_api_route(path, get_file, methods=["GET"])
    return routes

"""The routes of Anthropic's Messages API, over the endpoints that answer chat completions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.protocol import ChatCompletionRequest
from mars_ray.openai_api.responses import ChatResponseBuilder, ResponseMetadata
from mars_ray.openai_api.translate import check_limits
from mars_ray.platform.anthropic.api_form import MessagesErrorResponse
from mars_ray.platform.anthropic.protocol import CountTokensRequest, MessagesRequest, TokenCount
from mars_ray.platform.anthropic.responses import MessageResponse, MessageResponseBuilder
from mars_ray.platform.anthropic.translate import chat_request
from mars_ray.serve.http.endpoint import Endpoint, response_id
from mars_ray.serve.http.models import GatewayModels
from mars_ray.serve.http.routes import ERRORS, STREAM, endpoint_of
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.middleware.json_body import JsonRoute

MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": MessagesErrorResponse} for status in ERRORS}


def messages_routes(models: GatewayModels) -> APIRouter:
    """Return the routes of Anthropic's Messages API."""
    routes = APIRouter(route_class=JsonRoute, redirect_slashes=False, responses=MESSAGES_ERRORS)

    @routes.post("/v1/messages", response_model=MessageResponse, responses=STREAM)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await answer_messages(await endpoint_of(models, body.model, request), body, request)

    @routes.post("/v1/messages/count_tokens")
    async def count(body: CountTokensRequest, request: Request) -> TokenCount:
        endpoint = await endpoint_of(models, body.model, request)
        return await count_tokens(endpoint, body, Exchange.of(request.scope).key or "")

    return routes


async def answer_messages(endpoint: Endpoint, body: MessagesRequest, http: Request) -> Response:
    """Answer a conversation. Raises `ApiError` and `MarsRayError`."""
    id = response_id("msg", http)
    return await endpoint.converse(_chat_request(endpoint, body), http, id, partial(_builder, body.stop_sequences))


async def count_tokens(endpoint: Endpoint, body: CountTokensRequest, key: str) -> TokenCount:
    """Return the number of tokens of a prompt. Raises `ApiError` and `MarsRayError`."""
    model = await endpoint.check_model(body.model)
    request = _chat_request(endpoint, body)
    check_limits(request, endpoint.limits)
    tokens, _ = await endpoint.chat_prompt(request, model, key)
    return TokenCount(input_tokens=len(tokens))


def _chat_request(endpoint: Endpoint, body: CountTokensRequest) -> ChatCompletionRequest:
    return chat_request(body, reasons=endpoint.tokenizer.answer_format.reasoning is not None)


def _builder(
    stops: list[str], metadata: ResponseMetadata, plan: AnswerPlan, prompt: Sequence[int]
) -> MessageResponseBuilder:
    return MessageResponseBuilder(ChatResponseBuilder(metadata, plan), metadata, stops, len(prompt))

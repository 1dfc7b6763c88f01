"""The routes and the form of Anthropic's Messages API, over the endpoints that answer chat completions."""

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.protocol import ChatCompletionRequest
from mars_ray.openai_api.responses import ChatResponseBuilder, ResponseMetadata
from mars_ray.openai_api.translate import check_limits, check_messages
from mars_ray.platform.anthropic.protocol import NO_THREADS, CountTokensRequest, MessagesRequest, TokenCount
from mars_ray.platform.anthropic.responses import MessageResponse, MessageResponseBuilder
from mars_ray.platform.anthropic.translate import chat_request
from mars_ray.serve.http.endpoint import Endpoint, response_id
from mars_ray.serve.http.models import GatewayModels
from mars_ray.serve.http.routes import ERRORS, STREAM, endpoint_of
from mars_ray.serve.middleware.api_form import ApiForm
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.middleware.json_body import JsonRoute

PATH = "/v1/messages"

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's type of an error, by HTTP status. Other statuses have the type `invalid_request_error`."""


MESSAGES_NAMES = {
    "a message with the role tool and its tool_call_id": "a tool_result block with its tool_use_id",
    "correct tool_call_id": "correct tool_use_id",
    "strings in stop is": "strings in stop_sequences is",
}
"""Names in the Messages API, by the words of errors about the chat request."""


class MessagesErrorDetails(BaseModel):
    """Details of an error for programs."""

    error_code: str


class MessagesError(BaseModel):
    """The error object of Anthropic's API."""

    type: str
    message: str
    details: MessagesErrorDetails | None = None
    """Present for errors that Anthropic's client handles by itself."""


class MessagesErrorResponse(BaseModel):
    """Body of every error response of the Messages API."""

    type: Literal["error"]
    error: MessagesError
    request_id: str


def uses_messages_api(path: str) -> bool:
    """Return whether a path belongs to the Messages API."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return an error as the body of an answer of Anthropic's API, with the names of that API."""
    message = error.message
    for chat, own in MESSAGES_NAMES.items():
        message = message.replace(chat, own)
    shown: dict[str, Any] = {"type": TYPES.get(error.status, "invalid_request_error"), "message": message}
    if error.code == NO_THREADS:
        shown["details"] = {"error_code": NO_THREADS}
    return {"type": "error", "error": shown, "request_id": request_id}


ANTHROPIC = ApiForm(
    body=error_body,
    error_event="error",
    ends_with_done=False,
    id_header=b"request-id",
    key_header=b"x-api-key",
)

MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": MessagesErrorResponse} for status in ERRORS}


def messages_routes(models: GatewayModels) -> APIRouter:
    """Return the routes of Anthropic's Messages API."""
    routes = APIRouter(route_class=JsonRoute, redirect_slashes=False, responses=MESSAGES_ERRORS)

    @routes.post(PATH, response_model=MessageResponse, responses=STREAM)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        endpoint = await endpoint_of(models, body.model, request)

        def builder(metadata: ResponseMetadata, plan: AnswerPlan, prompt: Sequence[int]) -> MessageResponseBuilder:
            return MessageResponseBuilder(
                ChatResponseBuilder(metadata, plan), metadata, body.stop_sequences, len(prompt)
            )

        return await endpoint.converse(_chat_request(endpoint, body), request, response_id("msg", request), builder)

    @routes.post(f"{PATH}/count_tokens")
    async def count(body: CountTokensRequest, request: Request) -> TokenCount:
        endpoint = await endpoint_of(models, body.model, request)
        model = await endpoint.check_model(body.model)
        chat = _chat_request(endpoint, body)
        check_limits(chat, endpoint.limits)
        tokens, _ = await endpoint.chat_prompt(chat, model, Exchange.of(request.scope).key or "")
        return TokenCount(input_tokens=len(tokens))

    return routes


def _chat_request(endpoint: Endpoint, body: CountTokensRequest) -> ChatCompletionRequest:
    check_messages(body.messages, endpoint.limits)
    return chat_request(body, reasons=endpoint.tokenizer.answer_format.reasoning is not None)

"""Answer requests of Anthropic's Messages API with the endpoint that answers chat completions."""

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from mars_ray.platform.anthropic.protocol import CountTokensRequest, MessagesRequest, TokenCount
from mars_ray.platform.anthropic.responses import MessageResponseBuilder
from mars_ray.platform.anthropic.translate import chat_request
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.protocol import ChatCompletionRequest
from mars_ray.openai_api.responses import ChatResponseBuilder, ResponseMetadata
from mars_ray.openai_api.translate import check_limits
from mars_ray.serve.http.endpoint import Endpoint, response_id


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

"""Answer conversations from other deployments without HTTP, but with the checks and objects of the HTTP API.

In:    messages, and the other fields of a `/v1/chat/completions` body.
Out:   objects of the `openai` package; a `MarsRayError` for a request that cannot be answered.
Never: checks permissions: anyone who holds a handle may call.
"""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from openai.types.chat.chat_completion import ChatCompletion
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk
from pydantic import ValidationError

from mars_ray.chat.nesting import LEVELS, has_too_many_levels
from mars_ray.chat.unicode_text import refuse_lone_surrogates
from mars_ray.chat.validation_errors import validation_error
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.errors import RequestError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.choices import answers_of, split_by_token
from mars_ray.openai_api.prompt_scores import shown_prompt
from mars_ray.openai_api.protocol import ChatCompletionRequest
from mars_ray.openai_api.responses import ChatResponseBuilder, ResponseMetadata
from mars_ray.openai_api.translate import check_limits
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.generation import count_chunks
from mars_ray.serve.http.streams import MergedCalls

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Call:
    body: ChatCompletionRequest
    request: Request
    builder: ChatResponseBuilder
    usage: ResponseUsage


class ChatCalls:
    """Uses the engines of a running endpoint to answer conversations, in the class of service `service_class`."""

    def __init__(self, endpoint: Endpoint, service_class: str) -> None:
        self._endpoint = endpoint
        self._service_class = service_class

    async def stream(self, messages: Messages, fields: Mapping[str, Any]) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Yield the chunks of an answer as they arrive, then the usage; closing the generator cancels the request."""
        call = await self._prepared(messages, {**fields, "stream": True})
        arriving = MergedCalls[Sequence[Chunk]]([partial(self._endpoint.calls.stream, call.request, usage=call.usage)])
        try:
            while arrived := await arriving.next():
                _, chunks = arrived
                count_chunks(chunks, call.usage)
                for chunk in chunks:
                    for part in split_by_token(chunk) if call.body.stream_options.single_tokens else (chunk,):
                        for event in call.builder.chunks(part):
                            yield event
        finally:
            await arriving.close()
        for event in call.builder.last_chunks(call.usage.usage()):
            yield event

    async def collect(self, messages: Messages, fields: Mapping[str, Any]) -> ChatCompletion:
        """Return the answer once it is complete; cancelling the task cancels the request."""
        call = await self._prepared(messages, fields)
        chunks: list[Chunk] = []
        await self._endpoint.calls.collect(call.request, chunks)
        count_chunks(chunks, call.usage)
        answers = answers_of(chunks, call.body.n, 0, logprobs=call.body.logprobs)
        return call.builder.full(answers, call.usage.usage())

    async def _prepared(self, messages: Messages, fields: Mapping[str, Any]) -> _Call:
        """Return the request to the engine. Raises `RequestError` in the cases that the HTTP API answers with 400."""
        served = await self._endpoint.model_info()
        payload = {"model": served.name, "messages": [dict(message) for message in messages], **fields}
        if has_too_many_levels(payload):
            raise RequestError(f"the request is nested more than {LEVELS} levels deep.")
        refuse_lone_surrogates(payload)
        try:
            body = ChatCompletionRequest.model_validate(payload)
            model = await self._endpoint.check_model(body.model)
            check_limits(body, self._endpoint.limits)
            prompt, plan = await self._endpoint.chat_prompt(body, model, "")
            [request], usage = self._endpoint.requests_of(
                body, [prompt], model, plan, tenant="", service_class=self._service_class
            )
        except ValidationError as error:
            raise validation_error(error.errors(), payload) from None
        except ApiError as error:
            raise RequestError(error.message, param=error.param, code=error.code) from None
        metadata = ResponseMetadata(
            id=f"chatcmpl-{request.id}",
            created=int(time.time()),
            model=model.name,
            token_bytes=model.engine.token_bytes,
        )
        builder = ChatResponseBuilder(metadata, plan, shown_prompt(body, prompt))
        return _Call(body, request, builder, usage)

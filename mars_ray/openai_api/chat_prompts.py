"""Render chat requests for one model outside an endpoint.

In:    checked chat requests, or messages and tools as OpenAI's API takes them.
Out:   token ids, and the plan of the answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from mars_ray.data.chat import ChatEncoder, template_of
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import RequestError
from mars_ray.openai_api.answer_plan import AnswerPlan, plan_answer
from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.call_format import answer_format, ends_in_reasoning, markers_of
from mars_ray.openai_api.chat_messages import text_of
from mars_ray.openai_api.conversation import conversation
from mars_ray.openai_api.protocol import ChatCompletionRequest
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.openai_api.translate import tools_of
from mars_ray.openai_api.validation_errors import validation_error

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
"""Fields of a chat request that concern tools."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a chat request."""

    ids: list[int]
    """Token ids."""
    text: str
    """The last user message, to show in outputs."""
    plan: AnswerPlan
    """How the answer is held and parted."""


class ChatPrompts:
    """Renders chat requests with the chat template of a tokenizer. Raises `ModelError` if there is no template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.encoder = ChatEncoder(tokenizer)
        self._format = answer_format(template_of(tokenizer), markers_of(tokenizer))

    def render(self, body: ChatCompletionRequest, limits: RequestLimits) -> ChatPrompt:
        """Return the prompt of a request. Raises `ApiError`, and `BadRecordError` if the chat template refuses it."""
        offered = tools_of(body, limits)
        talk = conversation(body.messages, offered, self._format)
        rendered = self.encoder.prompt_text(talk.messages, talk.tools)
        plan = plan_answer(body, offered, self._format, in_reasoning=ends_in_reasoning(rendered))
        texts = [text_of(message) for message in body.messages if message.role == "user"]
        return ChatPrompt(self.encoder.ids(rendered), (texts or [text_of(body.messages[-1])])[-1], plan)

    def with_tools(self, messages: object, fields: Mapping[str, Any]) -> ChatPrompt:
        """Return the prompt for messages and some of the `TOOL_FIELDS`.

        Raises `RequestError`, and `BadRecordError` if the chat template refuses the messages.
        """
        body = {"model": "model", "messages": messages, **fields}
        try:
            return self.render(ChatCompletionRequest.model_validate(body), RequestLimits())
        except ValidationError as error:
            raise RequestError(validation_error(error.errors(), body).message) from error
        except ApiError as error:
            raise RequestError(error.message) from error


def sampling_with_plan(sampling: SamplingParams, plan: AnswerPlan) -> SamplingParams:
    """Return sampling parameters for an answer with this plan. Raises `RequestError` if they have a grammar."""
    if sampling.grammar is not None:
        raise RequestError("there are tools and a schema or another grammar; give only one of the two.")
    return replace(sampling, grammar=plan.grammar, skip_special_tokens=plan.skip_special_tokens)

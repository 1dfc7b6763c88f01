"""Render chat requests for one model outside an endpoint.

In:    checked chat requests, or messages and tools as OpenAI's API takes them.
Out:   token ids, and the plan of the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from mars_ray.chat.call_format import ends_in_reasoning
from mars_ray.chat.conversation import PlainMessage, last_user_text, plain_messages
from mars_ray.chat.unicode_text import refuse_lone_surrogates
from mars_ray.chat.validation_errors import validation_error
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import RequestError
from mars_ray.openai_api.answer_plan import AnswerPlan, plan_answer
from mars_ray.openai_api.protocol import ChatCompletionRequest, ResponseFormat
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.openai_api.tools import OfferedTools, ToolFields, conversation, tools_of

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
    """Grammar and parser of the answer."""


class ChatPrompts:
    """Renders chat requests with the chat template of a tokenizer. Raises `ModelError` if there is no template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.encoder = ChatEncoder(tokenizer)

    def render(self, body: ChatCompletionRequest, limits: RequestLimits) -> ChatPrompt:
        """Return the prompt of a request.

        Raises `RequestError`, and `BadRecordError` if the chat template refuses it.
        """
        offered = tools_of(body, limits)
        return self._prompt(
            plain_messages(body.messages),
            offered,
            response_format=body.response_format,
            budget=body.thinking_token_budget,
        )

    def with_tools(self, messages: Sequence[PlainMessage], fields: Mapping[str, Any]) -> ChatPrompt:
        """Return the prompt for checked messages and some of the `TOOL_FIELDS`.

        Raises `RequestError`, and `BadRecordError` if the chat template refuses the messages.
        """
        refuse_lone_surrogates(dict(fields))
        try:
            return self._prompt(messages, tools_of(ToolFields.model_validate(fields), RequestLimits()))
        except ValidationError as error:
            raise validation_error(error.errors(), fields) from error

    def _prompt(
        self,
        messages: Sequence[PlainMessage],
        offered: OfferedTools | None,
        response_format: ResponseFormat | None = None,
        budget: int | None = None,
    ) -> ChatPrompt:
        form = self.encoder.format
        talk = conversation(messages, offered, form)
        rendered = self.encoder.prompt_text(talk.messages, talk.tools)
        in_reasoning = ends_in_reasoning(rendered)
        plan = plan_answer(offered, form, in_reasoning=in_reasoning, response_format=response_format, budget=budget)
        return ChatPrompt(self.encoder.ids(rendered), last_user_text(messages), plan)


def sampling_with_plan(sampling: SamplingParams, plan: AnswerPlan) -> SamplingParams:
    """Return sampling parameters for an answer with this plan. Raises `RequestError` if they have a grammar."""
    if sampling.grammar is not None:
        raise RequestError("there are tools and a schema or another grammar; give only one of the two.")
    skip = sampling.skip_special_tokens and plan.skip_special_tokens
    return replace(sampling, grammar=plan.grammar, skip_special_tokens=skip)

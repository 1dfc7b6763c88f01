"""Turn the arguments of `LLM` and `AsyncLLM` into requests to the engine. Nothing is decoded here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from mars_ray.chat.conversation import PlainMessage, read_messages
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import RequestError
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.chat_prompts import ChatPrompt, ChatPrompts, sampling_with_plan

TextOrTokens = str | Sequence[int]
"""A prompt: a text for the model's tokenizer, or token ids."""
Conversation = str | Sequence[Mapping[str, Any] | BaseModel]
"""Messages in the format of OpenAI's chat API, also as objects of its client, or the text of a single user message."""
Schema = str | Mapping[str, Any] | type[BaseModel]
"""A JSON schema as text or as a mapping, or a pydantic model."""

Tools = Sequence[Mapping[str, Any]]
"""Functions in the format of `tools` of OpenAI's chat API."""
ToolChoice = str | Mapping[str, Any]
"""A `tool_choice` of OpenAI's chat API: "auto", "none", "required", or an object that names a function."""

_numbers = count()


def as_prompts(prompts: TextOrTokens | Sequence[TextOrTokens]) -> list[TextOrTokens]:
    """Return a list of prompts, given one prompt or several."""
    is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast(list[TextOrTokens], [prompts] if is_single else list(prompts))


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return a list of conversations, given one conversation or several."""
    is_single = isinstance(messages, str) or (len(messages) > 0 and isinstance(messages[0], Mapping | BaseModel))
    return cast(list[Conversation], [messages] if is_single else list(messages))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: TextOrTokens) -> tuple[int, ...]:
    """Return the token ids of a prompt."""
    return tuple(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else tuple(prompt)


def encode_conversation(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> tuple[int, ...]:
    """Return the token ids of a conversation, up to the beginning of the assistant's answer.

    Raises `ModelError` for a model without a chat template, `RequestError` for messages that OpenAI's chat API would
    refuse, and `BadRecordError` if the template refuses the conversation.
    """
    return tuple(ChatEncoder(tokenizer).prompt(_messages(conversation)))


def plan_with_tools(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], tools: Tools, tool_choice: ToolChoice
) -> list[ChatPrompt]:
    """Return the prompt of each conversation with these tools, and the plan of its answers.

    Raises the errors of `encode_conversation`, and `RequestError` for tools that the model cannot be given.
    """
    fields = {"tools": list(tools), "tool_choice": tool_choice}
    prompts = ChatPrompts(tokenizer)
    return [prompts.with_tools(_messages(conversation), fields) for conversation in conversations]


def make_requests(
    prompts: Sequence[tuple[int, ...]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    threshold: float | None,
    mode: Mode | str,
    schema: Schema | None,
    default: SamplingParams,
    plans: Sequence[AnswerPlan] = (),
    adapter: str | None = None,
) -> list[Request]:
    """Return one request per prompt; `default` replaces missing sampling parameters.

    `plans` are those of the answers to prompts with tools, one for each prompt.

    Raises `RequestError` for a value out of range.
    """
    if isinstance(sampling_params, Sequence):
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"there are {len(prompts)} prompts and {len(sampling_params)} sampling parameters; give one for all, "
                "or one for each prompt."
            )
        sampling = list(sampling_params)
    else:
        sampling = [sampling_params or default] * len(prompts)
    if schema is not None:
        sampling = [_with_schema(params, schema) for params in sampling]
    if plans:
        sampling = [sampling_with_plan(params, plan) for params, plan in zip(sampling, plans, strict=True)]
    if mode not in list(Mode):
        raise RequestError(f"mode is {mode!r}; choose one of {', '.join(Mode)}.")
    decode = DecodeParams(mode=Mode(mode), threshold=threshold, adapter=adapter)
    return [
        Request(id=f"llm-{next(_numbers)}", prompt=prompt, sampling=params, decode=decode)
        for prompt, params in zip(prompts, sampling, strict=True)
    ]


def _messages(conversation: Conversation) -> tuple[PlainMessage, ...]:
    if isinstance(conversation, str):
        return read_messages([{"role": "user", "content": conversation}])
    # Answers of OpenAI's client are objects.
    return read_messages(
        [message.model_dump() if isinstance(message, BaseModel) else message for message in conversation]
    )


def _with_schema(params: SamplingParams, schema: Schema) -> SamplingParams:
    if params.grammar is not None:
        raise RequestError("the sampling parameters have a grammar already; give a schema or a grammar, not both.")
    if isinstance(schema, str):
        text = schema
    else:
        text = json.dumps(schema if isinstance(schema, Mapping) else schema.model_json_schema())
    return replace(params, grammar=GrammarSpec(kind="json_schema", text=text))

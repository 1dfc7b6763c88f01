"""Turn the arguments of `LLM` and `AsyncLLM` into requests to the engine. Nothing is decoded here."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from numbers import Integral
from reprlib import repr as shortened
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, PydanticUserError
from transformers import PreTrainedTokenizerBase

from mars_ray.chat.conversation import PlainMessage, read_messages
from mars_ray.chat.unicode_text import refuse_lone_surrogates
from mars_ray.engine.checked_fields import items_of
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, Request, SamplingParams, token_ids
from mars_ray.errors import RequestError
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.chat_prompts import ChatPrompts, sampling_with_plan
from mars_ray.openai_api.tools import check_choice_without_tools

TextOrTokens = str | Iterable[int]
"""A prompt: a text for the model's tokenizer, or token ids."""
Message = Mapping[str, Any] | BaseModel
"""A message in the format of OpenAI's chat API, also as an object of its client."""
Conversation = str | Iterable[Message]
"""Messages, or the text of a single user message."""
Schema = str | Mapping[str, Any] | type[BaseModel]
"""A JSON schema as text or as a mapping, or a pydantic model."""

Tools = Sequence[Mapping[str, Any]]
"""Functions in the format of `tools` of OpenAI's chat API."""
ToolChoice = str | Mapping[str, Any]
"""A `tool_choice` of OpenAI's chat API: "auto", "none", "required", or an object that names a function."""

_numbers = count()


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: TextOrTokens | Iterable[TextOrTokens]
) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt, given one prompt or several: a list, a generator, an array or a Series.

    Raises a `RequestError`, which names the prompt, for a value that is neither text nor token ids.
    """
    if isinstance(prompts, str):
        return [encode_prompt(tokenizer, prompts, "prompts")]
    items = items_of(prompts)
    if items is None:
        raise RequestError(f"prompts is {shortened(prompts)}; it must be a text, token ids, or a list of such prompts.")
    if items and isinstance(items[0], Integral):
        return [token_ids("prompts", items)]
    return [encode_prompt(tokenizer, prompt, f"prompts[{number}]") for number, prompt in enumerate(items)]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: TextOrTokens, name: str = "prompt") -> tuple[int, ...]:
    """Return the token ids of a prompt. Raises a `RequestError`, which names the argument, for an unusable value."""
    if not isinstance(prompt, str):
        return token_ids(name, prompt)
    refuse_lone_surrogates({name: prompt})
    return tuple(tokenizer(prompt)["input_ids"])


def as_conversations(messages: Conversation | Iterable[Conversation]) -> list[tuple[PlainMessage, ...]]:
    """Return checked conversations, given one or several: a list, a generator, an array or a Series.

    Raises a `RequestError`, which names the conversation, for a value that is neither text nor messages, and for
    messages that OpenAI's chat API would refuse.
    """
    items = items_of(messages)
    if items is None:
        return [as_conversation(cast(Conversation, messages))]
    if items and isinstance(items[0], Mapping | BaseModel):
        return [as_conversation(items)]
    return [as_conversation(item, f"messages[{number}]") for number, item in enumerate(items)]


def as_conversation(value: Conversation, name: str = "messages") -> tuple[PlainMessage, ...]:
    """Return a checked conversation. Raises a `RequestError`, which names the argument, for another value."""
    if isinstance(value, str):
        return read_messages([{"role": "user", "content": value}], name)
    items = items_of(value)
    return read_messages(value if items is None else _as_json(items, name), name)


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[PlainMessage]],
    tools: Tools | None = None,
    tool_choice: ToolChoice = "auto",
) -> tuple[list[tuple[int, ...]], list[AnswerPlan]]:
    """Return the token ids of each conversation, up to the beginning of the answer, and with tools each answer's plan.

    Raises `ModelError` for a model without a chat template, `BadRecordError` if the template refuses a conversation,
    and `RequestError` for tools that the model cannot be given.
    """
    prompts = ChatPrompts(tokenizer)
    checked = as_tools(tools)
    if not checked:
        check_choice_without_tools(tool_choice)
        return [tuple(prompts.encoder.prompt(conversation)) for conversation in conversations], []
    fields = {"tools": checked, "tool_choice": tool_choice}
    planned = [prompts.with_tools(conversation, fields) for conversation in conversations]
    return [tuple(prompt.ids) for prompt in planned], [prompt.plan for prompt in planned]


def as_tools(tools: Tools | None) -> list[Mapping[str, Any]]:
    """Return a list of tools, given one tool or several. Raises `RequestError` for a value that is no tool."""
    if tools is None:
        return []
    items = [tools] if isinstance(tools, Mapping) else items_of(tools)
    if items is None or not all(isinstance(tool, Mapping) for tool in items):
        raise RequestError(f"tools is {shortened(tools)}; it must be a list of functions in OpenAI's format.")
    return [_as_json(tool, "tools") for tool in items]


def decode_params(mode: Mode | str, threshold: float | None, adapter: str | None) -> DecodeParams:
    """Return the decoding parameters. Raises `RequestError` for a value out of range."""
    return DecodeParams(mode=mode, threshold=threshold, adapter=adapter)  # type: ignore[arg-type]  # it converts text


def make_requests(
    prompts: Sequence[tuple[int, ...]],
    sampling_params: SamplingParams | Iterable[SamplingParams] | None,
    decode: DecodeParams,
    schema: Schema | None,
    *,
    default: SamplingParams,
    plans: Sequence[AnswerPlan] = (),
) -> list[Request]:
    """Return one request per prompt; `default` replaces missing sampling parameters.

    `plans` are those of the answers to prompts with tools, one for each prompt. Raises `RequestError` for a value out
    of range.
    """
    sampling = _sampling(sampling_params, len(prompts), default)
    if schema is not None:
        sampling = [_with_schema(params, schema) for params in sampling]
    if plans:
        sampling = [sampling_with_plan(params, plan) for params, plan in zip(sampling, plans, strict=True)]
    return [
        Request(id=f"llm-{next(_numbers)}", prompt=prompt, sampling=params, decode=decode)
        for prompt, params in zip(prompts, sampling, strict=True)
    ]


def _sampling(
    sampling_params: SamplingParams | Iterable[SamplingParams] | None, prompts: int, default: SamplingParams
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or default] * prompts
    items = items_of(sampling_params)
    if items is None or not all(isinstance(item, SamplingParams) for item in items):
        raise RequestError(
            f"sampling_params is {shortened(sampling_params)}; it must be SamplingParams, or a list with one for each "
            "prompt."
        )
    if len(items) != prompts:
        raise RequestError(
            f"there are {prompts} prompts and {len(items)} sampling parameters; give one for all, or one for each "
            "prompt."
        )
    return items


def _as_json(value: Any, name: str) -> Any:
    """Return messages or a tool as JSON has them, whose parts may be objects of OpenAI's client or cells of a table.

    Values that JSON does not have stay, so that the check of their field names them. Raises a `RequestError`, which
    names the argument, for values nested too deeply.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply.") from None


def _plain(value: Any) -> Any:
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    items = items_of(value)
    return value if items is None else [_plain(item) for item in items]


def _with_schema(params: SamplingParams, schema: Schema) -> SamplingParams:
    if params.grammar is not None:
        raise RequestError("the sampling parameters have a grammar already; give a schema or a grammar, not both.")
    return replace(params, grammar=GrammarSpec(kind="json_schema", text=_schema_text(schema)))


def _schema_text(schema: Schema) -> str:
    if isinstance(schema, str):
        return schema
    try:
        if isinstance(schema, Mapping):
            return json.dumps(dict(schema))
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            return json.dumps(schema.model_json_schema())
    except (TypeError, ValueError, RecursionError, PydanticUserError) as error:
        raise RequestError(f"schema cannot be written as JSON: {error}.") from error
    raise RequestError(f"schema is {shortened(schema)}; it must be a JSON schema or a pydantic model.")

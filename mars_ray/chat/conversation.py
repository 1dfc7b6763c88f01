"""Conversations with tool calls: checked as OpenAI's API does, and turned into what chat templates read.

In:    messages in the form of OpenAI's chat API, from a request, a row, a record or a program.
Out:   plain messages, whose content is one text and whose calls have ids; what a chat template reads of them.
Never: passes on a result without its call, or a call without its result before a further message.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mars_ray.chat.call_format import AnswerFormat, known_format
from mars_ray.chat.generic_tools import TemplateMessage, generic_messages
from mars_ray.chat.messages import (
    AssistantMessage,
    FunctionMessage,
    Message,
    Messages,
    ToolCall,
    ToolMessage,
    text_of,
)
from mars_ray.chat.tools import Functions, Tools, check_functions, template_tools
from mars_ray.chat.unicode_text import refuse_lone_surrogates
from mars_ray.chat.validation_errors import NAME_CHARS, validation_error
from mars_ray.errors import RequestError

PlainMessage = dict[str, Any]
"""A checked message in the form of OpenAI's chat API, as JSON: its content is one text, its calls have ids, and their
arguments are text, which is JSON unless the answer was cut off."""
ToolDefinition = dict[str, Any]
"""A checked function in the form of `tools` of OpenAI's chat API, as JSON."""

LEGACY_ID = "function_call"
"""Id of a call in the older form, which has none."""

_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(Messages)
_TOOLS: TypeAdapter[Any] = TypeAdapter(Tools)
_FUNCTIONS: TypeAdapter[Any] = TypeAdapter(Functions)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation for a chat template."""

    messages: list[TemplateMessage]
    tools: list[ToolDefinition]
    """Functions for the template to describe; empty if a message describes them already."""


def read_messages(value: object, name: str = "messages", *, answered: bool = True) -> tuple[PlainMessage, ...]:
    """Return the messages of a list, wherever it comes from. Raises `RequestError`, which calls the list `name`.

    With `answered` an answer follows, so every call must have its result. Otherwise the last calls may lack theirs.
    """
    messages = plain_messages(_checked(_MESSAGES, value, name), answered=answered)
    refuse_lone_surrogates({name: messages})
    return tuple(messages)


def read_tools(value: object, name: str = "tools") -> list[ToolDefinition]:
    """Return the functions of a list of `tools`, or of their older form `functions`. Raises `RequestError`."""
    if name == "functions":
        functions = _checked(_FUNCTIONS, value, name)
    else:
        functions = [tool.function for tool in _checked(_TOOLS, value, name)]
    check_functions(functions, name)
    tools = template_tools(functions)
    refuse_lone_surrogates({name: tools})
    return tools


def _checked(adapter: TypeAdapter[Any], value: object, name: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        errors = [{**detail, "loc": (name, *detail["loc"])} for detail in error.errors(include_url=False)]
        raise validation_error(errors, {name: value}) from None


def plain_messages(messages: Sequence[Message], *, answered: bool = True) -> list[PlainMessage]:
    """Return checked messages as JSON. Raises `RequestError` unless each call is followed by its result."""
    open_ids: dict[str, None] = {}
    plain: list[PlainMessage] = []
    asking: PlainMessage = {}
    for number, message in enumerate(messages):
        fields: PlainMessage = {"role": message.role, "content": text_of(message.content)}
        if message.name:
            fields["name"] = message.name
        if isinstance(message, ToolMessage | FunctionMessage):
            fields |= {"role": "tool", **_answered_call(message, number, open_ids, asking)}
        else:
            _check_answered(open_ids)
            asking = fields
        if isinstance(message, AssistantMessage):
            if message.reasoning_content:
                fields["reasoning_content"] = message.reasoning_content
            if calls := _calls_of(message, number):
                fields["tool_calls"] = calls
                open_ids = dict.fromkeys(call["id"] for call in calls)
                if len(open_ids) < len(calls):
                    raise RequestError("an answer has two calls with one id; ids must differ.", param="messages")
        plain.append(fields)
    if answered:
        _check_answered(open_ids)
    return plain


def template_conversation(
    messages: Sequence[PlainMessage],
    tools: Sequence[ToolDefinition],
    model: AnswerFormat,
    param: str = "tools",
    *,
    answered: bool = True,
) -> Conversation:
    """Return the conversation in the form that the model's chat template expects.

    Raises `RequestError`, which names the field `param` for tools, if the template shows neither tools nor calls, or
    if an answer follows and the model writes calls in an unknown format.
    """
    rendered = [_template_message(message) for message in messages]
    if not tools and not any("tool_calls" in message for message in rendered):
        return Conversation(rendered, [])
    if answered or not model.template_takes_tools:
        known_format(model, param if tools else "messages")
    if model.calls is not None and model.generic:
        return Conversation(generic_messages(rendered, tools, model.calls), [])
    if model.calls is not None and model.calls.name == "mistral":
        _shorten_ids(rendered)
    return Conversation(rendered, list(tools))


def template_text(conversation: Conversation) -> list[str]:
    """Return all texts of a conversation, so that its length can be checked before it is rendered."""
    texts = [message["content"] for message in conversation.messages]
    calls = [call for message in conversation.messages for call in message.get("tool_calls", ())]
    texts += [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    texts += [json.dumps(tool, ensure_ascii=False) for tool in conversation.tools]
    return texts


def last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the last message of the user, to show for a conversation; without one the last message."""
    texts = [message["content"] for message in messages if message["role"] == "user"]
    return str(texts[-1] if texts else messages[-1]["content"])


def _template_message(message: PlainMessage) -> TemplateMessage:
    fields = dict(message)
    if fields["role"] == "developer":  # few templates know OpenAI's newer word for "system"
        fields["role"] = "system"
    if "tool_calls" in fields:
        fields["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": read_arguments(call["function"]["arguments"]) or {}}}
            for call in fields["tool_calls"]
        ]
    return fields


def _calls_of(message: AssistantMessage, number: int) -> list[dict[str, Any]]:
    calls = list(message.tool_calls)
    if message.function_call is not None:
        if calls:
            raise RequestError("a message has either tool_calls or function_call, not both.", param="messages")
        calls = [ToolCall(id=LEGACY_ID, type="function", function=message.function_call)]
    return [
        {
            "id": call.id or f"call_{number}_{index}",
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments or "{}"},
        }
        for index, call in enumerate(calls)
    ]


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call. None if they are no JSON object, such as those of an answer that was cut off."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _answered_call(
    message: ToolMessage | FunctionMessage, number: int, open_ids: dict[str, None], asking: PlainMessage
) -> dict[str, str]:
    """Return the id of the call that a message answers, and remove it from the open ones of the message `asking`."""
    id = LEGACY_ID if isinstance(message, FunctionMessage) else message.tool_call_id
    if not id:
        if open_ids:
            id = next(iter(open_ids))
        elif asking.get("role") == "assistant" and "tool_calls" not in asking:
            return {}  # the assistant wrote the call in its text, as in data sets that are older than `tool_calls`
        else:
            raise RequestError(f"messages.{number}.tool_call_id is missing.", param="messages")
    if id not in open_ids:
        raise RequestError(
            f"the result of a call {id[:NAME_CHARS]!r} has no call with this id before it; send the assistant's "
            "message with that call too, or correct tool_call_id.",
            param="messages",
        )
    del open_ids[id]
    return {"tool_call_id": id}


def _check_answered(open_ids: Mapping[str, None]) -> None:
    if open_ids:
        raise RequestError(
            f"the call {next(iter(open_ids))[:NAME_CHARS]!r} has no result; add a message with the role tool and its "
            "tool_call_id after it.",
            param="messages",
        )


def call_id(*parts: object, short: bool = False) -> str:
    """Return an id for a call, which is the same for the same parts. Mistral's templates take nine characters only."""
    digest = blake2b(" ".join(map(str, parts)).encode(), digest_size=12).hexdigest()
    return digest[:9] if short else f"call_{digest}"


def _shorten_ids(messages: Sequence[TemplateMessage]) -> None:
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = call_id(message["tool_call_id"], short=True)
        for call in message.get("tool_calls", ()):
            call["id"] = call_id(call["id"], short=True)

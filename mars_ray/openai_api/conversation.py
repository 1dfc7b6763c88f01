"""Conversations with tool calls: checked as OpenAI's API does, and turned into what chat templates read.

In:    the checked messages of a request, and the formats of the model.
Out:   messages for the chat template, with the arguments of calls as objects.
Never: passes on a result without its call, or a call without its result.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.call_format import AnswerFormat
from mars_ray.openai_api.chat_messages import (
    AssistantMessage,
    FunctionMessage,
    Message,
    ToolCall,
    ToolMessage,
    text_of,
)
from mars_ray.openai_api.generic_tools import TemplateMessage, generic_messages
from mars_ray.openai_api.tools import OfferedTools, known_format

LEGACY_ID = "function_call"
"""Id of a call in the older form, which has none."""

ID_CHARS = 80
"""Maximum characters of a call's id in an error message."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation for a chat template."""

    messages: list[TemplateMessage]
    tools: list[dict[str, Any]]
    """Functions for the template to describe; empty if a message describes them already."""


def conversation(messages: Sequence[Message], offered: OfferedTools | None, model: AnswerFormat) -> Conversation:
    """Return the conversation in the form that the model's chat template expects. Raises an `ApiError`."""
    rendered = [_template_message(message) for message in messages]
    tools = offered.template_tools() if offered else []
    has_calls = _check_calls(messages, rendered)
    if not tools and not has_calls:
        return Conversation(rendered, [])
    call_format = known_format(model, offered.param if offered else "messages")
    if model.generic:
        return Conversation(generic_messages(rendered, tools, call_format), [])
    if call_format.name == "mistral":
        _shorten_ids(rendered)
    return Conversation(rendered, tools)


def template_text(conversation: Conversation) -> list[str]:
    """Return all texts of a conversation, so that its length can be checked before it is rendered."""
    texts = [message["content"] for message in conversation.messages]
    calls = [call for message in conversation.messages for call in message.get("tool_calls", ())]
    texts += [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    texts += [json.dumps(tool, ensure_ascii=False) for tool in conversation.tools]
    return texts


def _template_message(message: Message) -> TemplateMessage:
    # Few templates know the role "developer", OpenAI's newer word for "system".
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    fields: TemplateMessage = {"role": role, "content": text_of(message)}
    if message.name:
        fields["name"] = message.name
    if isinstance(message, AssistantMessage):
        if message.reasoning_content:
            fields["reasoning_content"] = message.reasoning_content
        if calls := _calls_of(message):
            fields["tool_calls"] = calls
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    if isinstance(message, FunctionMessage):
        fields["tool_call_id"] = LEGACY_ID
    return fields


def _calls_of(message: AssistantMessage) -> list[dict[str, Any]]:
    calls = list(message.tool_calls)
    if message.function_call is not None:
        if calls:
            raise ApiError.bad_request("a message has either tool_calls or function_call, not both.", "messages")
        calls = [ToolCall(id=LEGACY_ID, type="function", function=message.function_call)]
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(call)},
        }
        for call in calls
    ]


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError.bad_request(
            f"the arguments of the call {call.id[:ID_CHARS]!r} are no JSON object; send them as the answer had them.",
            "messages",
        )
    return arguments


def _check_calls(messages: Sequence[Message], rendered: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the conversation has calls. Raises an `ApiError` unless each call is followed by its result."""
    open_ids: dict[str, None] = {}
    has_calls = False
    for message, fields in zip(messages, rendered, strict=True):
        if isinstance(message, ToolMessage | FunctionMessage):
            id = message.tool_call_id if isinstance(message, ToolMessage) else LEGACY_ID
            if id not in open_ids:
                raise ApiError.bad_request(
                    f"the result of a call {id[:ID_CHARS]!r} follows no message of the assistant with that call; send "
                    "that message too.",
                    "messages",
                )
            del open_ids[id]
            continue
        _check_answered(open_ids)
        calls = fields.get("tool_calls", ())
        has_calls = has_calls or bool(calls)
        open_ids = dict.fromkeys(call["id"] for call in calls)
        if len(open_ids) < len(calls):
            raise ApiError.bad_request("an answer has two calls with one id; ids must differ.", "messages")
    _check_answered(open_ids)
    return has_calls


def _check_answered(open_ids: Mapping[str, None]) -> None:
    if open_ids:
        raise ApiError.bad_request(
            f"the call {next(iter(open_ids))[:ID_CHARS]!r} has no result; add a message with the role tool and its "
            "tool_call_id after it.",
            "messages",
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

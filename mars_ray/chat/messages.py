"""Messages of a conversation in the form of OpenAI's chat API: text, tool calls and their results."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mars_ray.chat.client_fields import (
    ASSISTANT_FIELDS,
    CALL_FIELDS,
    FUNCTION_FIELDS,
    MESSAGE_FIELDS,
    PART_FIELDS,
    SentBack,
    joined_texts,
)
from mars_ray.chat.request_body import CALLS_MAX, MESSAGES_MAX, PARTS_MAX, Items, tagged_by
from mars_ray.errors import RequestError

MAY_BE_EMPTY = ("assistant", "tool", "function")
"""Roles of messages whose content may be a list without parts."""


class TextPart(SentBack):
    """A text part of a message's content."""

    unused = PART_FIELDS

    type: Literal["text"]
    text: str


class _BaseMessage(SentBack):
    """One message of a conversation."""

    unused = MESSAGE_FIELDS

    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _join_content(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # Tables and dumped objects have every field, also those that are for other roles.
        message = {name: item for name, item in value.items() if name != "tool_calls" or item != []}
        if message.get("role") == "assistant":
            return _without_refusal(message)
        return _with_one_text(message)


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose parts of text are one text. An answer and a result may be empty, without any part."""
    if not isinstance(parts := message.get("content"), list):
        return message
    empty = not parts and message.get("role") in MAY_BE_EMPTY
    return {**message, "content": "" if empty else joined_texts(parts, PART_FIELDS, param="messages")}


Text = str | Annotated[Items[TextPart], Field(min_length=1, max_length=PARTS_MAX)]


class InputMessage(_BaseMessage):
    """A message to the assistant, from a user, a developer or the system."""

    role: Literal["developer", "system", "user"]
    content: Text


def _as_json_text(arguments: Any) -> Any:
    """Return arguments as JSON text. Data sets hold them as objects, as chat templates read them."""
    if not isinstance(arguments, dict):
        return arguments
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # a value of Python that is no JSON, or one nested too deeply
        return arguments


class CalledFunction(SentBack):
    """The function of a call, and its arguments as JSON text or as an object."""

    unused = FUNCTION_FIELDS

    name: str
    arguments: Annotated[str, BeforeValidator(_as_json_text)]


class ToolCall(SentBack):
    """A call in an assistant message. Without an id, results belong to the calls in order."""

    unused = CALL_FIELDS

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(_BaseMessage):
    """A message from the assistant. Its content may be null, as in answers that are calls."""

    unused = ASSISTANT_FIELDS

    role: Literal["assistant"]
    content: Text | None = None
    reasoning_content: str | None = None
    tool_calls: Items[ToolCall] = Field([])
    function_call: CalledFunction | None = None
    """Older form of `tool_calls`, for a single call."""


class ToolMessage(_BaseMessage):
    """The result of a call; without an id, of the first call that has none yet."""

    role: Literal["tool"]
    content: Text
    tool_call_id: str | None = None


class FunctionMessage(_BaseMessage):
    """Older form of a tool message: the result of the call before it."""

    role: Literal["function"]
    content: Text


Message = Annotated[
    InputMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role"), tagged_by("role")
]


def _few_calls(messages: Any) -> Any:
    """Refuse too many calls before checking any of them, because each check delays all other callers."""
    if isinstance(messages, list):
        lists = (message.get("tool_calls") for message in messages if isinstance(message, dict))
        count = sum(len(calls) for calls in lists if isinstance(calls, list))
        if count > CALLS_MAX:
            raise ValueError(f"messages holds {count} tool calls; it may have up to {CALLS_MAX}")
    return messages


Messages = Annotated[Items[Message], Field(min_length=1, max_length=MESSAGES_MAX), BeforeValidator(_few_calls)]


def text_of(content: str | list[TextPart] | None) -> str:
    """Return the content of a message as one text; empty if it has none."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _without_refusal(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant message with one text: its refusal is its content, its reasoning `reasoning_content`."""
    if message.get("audio"):
        raise RequestError("messages with audio are not supported.", param="messages")
    kept = {key: item for key, item in message.items() if key not in ("audio", "refusal", "reasoning")}
    # vLLM and OpenRouter name the text of the reasoning `reasoning`; elsewhere an object of that name has settings.
    if isinstance(reasoning := message.get("reasoning"), str):
        kept["reasoning_content"] = kept.get("reasoning_content") or reasoning
    # A longer list is refused by its length, so its parts need no work.
    if isinstance(parts := kept.get("content"), list) and len(parts) <= PARTS_MAX:
        kept["content"] = [refusal_as_text(part) for part in parts]
    kept = _with_one_text(kept)
    if (refusal := message.get("refusal")) not in (None, ""):  # streams are merged to empty texts
        if kept.get("content") not in (None, ""):
            raise RequestError("a message has either content or refusal, not both.", param="messages")
        kept["content"] = refusal
    return kept


def refusal_as_text(part: Any) -> Any:
    """Return a part of a message's content, as text if it is a refusal."""
    if isinstance(part, dict) and part.get("type") == "refusal" and "refusal" in part and "text" not in part:
        return {name: item for name, item in part.items() if name != "refusal"} | {
            "type": "text",
            "text": part["refusal"],
        }
    return part

"""Messages of a conversation in the form of OpenAI's chat API: text, tool calls and their results."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.request_body import Items, RequestBody, tagged_by
from mars_ray.openai_api.request_limits import CALLS_MAX, MESSAGES_MAX, PARTS_MAX


class TextPart(RequestBody):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


def _text_of_parts(parts: list[Any]) -> str | None:
    """Return text parts joined to one text; None if a part is invalid, so that pydantic reports the error.

    Raises `ApiError` for parts of other kinds. Joining avoids a pydantic model per part: a body has room for 40,000
    parts, and that many models would delay all other callers.
    """
    if not 1 <= len(parts) <= PARTS_MAX:
        return None
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ApiError.bad_request(f"content of type {kind[:40]!r} is not supported; only text is.", "messages")
        if kind is None or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            return None
    return "".join(part["text"] for part in parts)


class _BaseMessage(RequestBody):
    """One message of a conversation."""

    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_content(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("role") == "assistant":
            value = _without_refusal(value)
        kept = {key: item for key, item in value.items() if item is not None}
        if isinstance(parts := kept.get("content"), list) and (text := _text_of_parts(parts)) is not None:
            kept["content"] = text
        return kept


Text = str | Annotated[Items[TextPart], Field(min_length=1, max_length=PARTS_MAX)]


class InputMessage(_BaseMessage):
    """A message to the assistant, from a user, a developer or the system."""

    role: Literal["developer", "system", "user"]
    content: Text


class CalledFunction(RequestBody):
    """The function of a call, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(RequestBody):
    """A call in an assistant message."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_BaseMessage):
    """A message from the assistant. Its content may be null, as in answers that are calls."""

    role: Literal["assistant"]
    content: Text | None = None
    reasoning_content: str | None = None
    tool_calls: Items[ToolCall] = Field([])
    function_call: CalledFunction | None = None
    """Older form of `tool_calls`, for a single call."""


class ToolMessage(_BaseMessage):
    """The result of a call."""

    role: Literal["tool"]
    content: Text
    tool_call_id: str


class FunctionMessage(_BaseMessage):
    """Older form of a tool message: the result of the call before it."""

    role: Literal["function"]
    content: Text


Message = Annotated[
    InputMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role"), tagged_by("role")
]


def _few_calls(messages: Any) -> Any:
    """Refuse too many calls before any of them is checked, because checking each delays all other callers."""
    if isinstance(messages, list):
        lists = (message.get("tool_calls") for message in messages if isinstance(message, dict))
        count = sum(len(calls) for calls in lists if isinstance(calls, list))
        if count > CALLS_MAX:
            raise ValueError(f"messages holds {count} tool calls; it may have up to {CALLS_MAX}")
    return messages


Messages = Annotated[Items[Message], Field(min_length=1, max_length=MESSAGES_MAX), BeforeValidator(_few_calls)]


def text_of(message: Message) -> str:
    """Return the content of a message as one text; empty if it has none."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(part.text for part in message.content)


def _without_refusal(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant message without annotations; the text of a refusal becomes its content."""
    if message.get("audio"):
        raise ApiError.bad_request("messages with audio are not supported.", "messages")
    # Annotations only point into the text, which is complete without them.
    kept = {key: item for key, item in message.items() if key not in ("audio", "annotations", "refusal")}
    # A longer list is refused by its length, so its parts need no work.
    if isinstance(parts := kept.get("content"), list) and len(parts) <= PARTS_MAX:
        kept["content"] = [_refusal_as_text(part) for part in parts]
    if (refusal := message.get("refusal")) is not None:
        if kept.get("content") is not None:
            raise ApiError.bad_request("a message has either content or refusal, not both.", "messages")
        kept["content"] = refusal
    return kept


def _refusal_as_text(part: Any) -> Any:
    if isinstance(part, dict) and part.keys() == {"type", "refusal"} and part["type"] == "refusal":
        return {"type": "text", "text": part["refusal"]}
    return part

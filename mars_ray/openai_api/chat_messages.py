"""Messages of a conversation as OpenAI's chat API takes them, with text alone for content."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mars_ray.openai_api.api_error import ApiError
from mars_ray.openai_api.request_body import Items, RequestBody, tagged_by
from mars_ray.openai_api.request_limits import MESSAGES_MAX, PARTS_MAX

NO_TEXT = ("tool_calls", "function_call", "audio")
"""What an assistant's message may hold beside text; accepted when null or empty, because it then says nothing."""


class TextPart(RequestBody):
    """A part of a message's content: text."""

    type: Literal["text"]
    text: str


def _text_of_parts(parts: list[Any]) -> str | None:
    """Return text parts as one text; None where one is wrong, for pydantic to say how. Raises for parts of other kinds.

    Making models of the parts of many messages would hold all other callers up: a body has room for 40,000.
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
            value = _text_only(value)
        kept = {key: item for key, item in value.items() if item is not None}
        if isinstance(parts := kept.get("content"), list) and (text := _text_of_parts(parts)) is not None:
            kept["content"] = text
        return kept


Text = str | Annotated[Items[TextPart], Field(min_length=1, max_length=PARTS_MAX)]


class InputMessage(_BaseMessage):
    """A message to the assistant."""

    role: Literal["developer", "system", "user"]
    content: Text


class AssistantMessage(_BaseMessage):
    """A message of the assistant. Its content may be null: OpenAI's answers have that, and clients send them back."""

    role: Literal["assistant"]
    content: Text | None = None


Message = Annotated[InputMessage | AssistantMessage, Field(discriminator="role"), tagged_by("role")]
Messages = Annotated[Items[Message], Field(min_length=1, max_length=MESSAGES_MAX)]


def text_of(message: Message) -> str:
    """Return the content as one text."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(part.text for part in message.content)


def _text_only(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with nothing but text; the text of a refusal counts as its content."""
    for name in NO_TEXT:
        if message.get(name):
            raise ApiError.bad_request(f"messages with {name} are not supported.", "messages")
    # Annotations point into the text, which stands by itself.
    kept = {key: item for key, item in message.items() if key not in (*NO_TEXT, "annotations", "refusal")}
    if isinstance(parts := kept.get("content"), list):
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

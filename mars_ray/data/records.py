"""Parse training records: conversations with at least one assistant turn."""

import json
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

from mars_ray.errors import BadRecordError

Message = dict[str, str]
"""A message with `role` and `content`, as in chat templates."""

ROLES = ("system", "developer", "user", "assistant", "tool")

UNSUPPORTED = ("tool_calls", "function_call")
"""Parts that make a message invalid: if they were left out, a model would learn incomplete answers."""


@dataclass(frozen=True, slots=True)
class Record:
    """A conversation from whose assistant turns a model learns."""

    messages: tuple[Message, ...]


def parse_record(raw: bytes) -> Record:
    """Parse one record. Raises `BadRecordError` with the reason if it is invalid."""
    # In parquet every record has every column, so null means that a field is absent.
    fields = {name: value for name, value in parse_object(raw).items() if value is not None}
    if "messages" in fields:
        messages = parse_messages(fields["messages"])
    elif "prompt" in fields:
        messages = (
            {"role": "user", "content": _text(fields, "prompt")},
            {"role": "assistant", "content": _text(fields, "response")},
        )
    else:
        raise BadRecordError(f"it has neither 'messages' nor 'prompt' and 'response', only {shortened(sorted(fields))}")
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
        raise BadRecordError("it has no response: there is nothing to learn from it")
    return Record(messages)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse the UTF-8 JSON text of an object, with or without a byte-order mark. Raises `BadRecordError`."""
    try:
        # Decode here, because json.loads would also accept UTF-16 and lone surrogates.
        fields = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise BadRecordError(f"it is not JSON ({error}): {raw[:60]!r}") from None
    if not isinstance(fields, dict):
        raise BadRecordError(f"it is not a JSON object but {raw[:60]!r}")
    return fields


def parse_messages(value: object) -> tuple[Message, ...]:
    """Check a list of messages. Raises `BadRecordError`, which names the first bad message."""
    if not isinstance(value, list) or not value:
        raise BadRecordError(f"'messages' must be a list with at least one message, not {_shown(value)}")
    return tuple(_message(f"message {number}", message) for number, message in enumerate(value))


def _message(name: str, value: object) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise BadRecordError(f"{name} needs a 'role' and a text 'content', not {_shown(value)}")
    if value.get("role") not in ROLES:
        raise BadRecordError(
            f"{name} has the role {shortened(value.get('role'))}; the known roles are {', '.join(ROLES)}"
        )
    for part in UNSUPPORTED:
        if value.get(part):
            raise BadRecordError(f"{name} has {part!r}, which mars-ray does not support")
    return {"role": value["role"], "content": _unicode(name, value["content"])}


def _text(fields: dict[str, Any], name: str) -> str:
    if name not in fields:
        raise BadRecordError(f"it has no {name!r}")
    if not isinstance(fields[name], str):
        raise BadRecordError(f"{name!r} must be text, not {_shown(fields[name])}")
    return _unicode(repr(name), fields[name])


def _unicode(name: str, text: str) -> str:
    """Return `text`. Raises `BadRecordError` for half of a surrogate pair, which JSON allows but tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecordError(f"{name} holds {text[error.start]!a}, which is no character") from None
    return text


def _shown(value: object) -> str:
    return f"{type(value).__name__} {shortened(value)}"

"""One training record: a conversation with at least one assistant turn.

In:    the JSON text of a record, with `messages` (role, content) or `prompt` and `response`.
Out:   a `Record`, or a `BadRecordError` that says what is wrong with it.
Never: reads files, knows a tokenizer.
"""

import json
from dataclasses import dataclass
from typing import Any

from mars_ray.errors import BadRecordError

Message = dict[str, str]
"""`role` and `content`, as chat templates take them."""

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Record:
    """A conversation to learn the assistant turns of."""

    messages: tuple[Message, ...]


def parse_record(raw: bytes) -> Record:
    """Parse one record. Raises `BadRecordError` with the reason."""
    fields = parse_object(raw)
    if "messages" in fields:
        messages = parse_messages(fields["messages"])
    elif "prompt" in fields:
        messages = (
            {"role": "user", "content": _text(fields, "prompt")},
            {"role": "assistant", "content": _text(fields, "response")},
        )
    else:
        raise BadRecordError(f"it has neither 'messages' nor 'prompt' and 'response', only {sorted(fields)}")
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
        raise BadRecordError("it has no response: there is nothing to learn from it")
    return Record(messages)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse the UTF-8 JSON text of an object. Raises `BadRecordError`."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise BadRecordError(f"it is not JSON ({error}): {raw[:60]!r}") from None
    if not isinstance(fields, dict):
        raise BadRecordError(f"it is not a JSON object but {raw[:60]!r}")
    return fields


def parse_messages(value: object) -> tuple[Message, ...]:
    """Check a list of messages. Raises `BadRecordError` naming the first bad one."""
    if not isinstance(value, list) or not value:
        raise BadRecordError(f"'messages' must be a list with at least one message, not {_shown(value)}")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise BadRecordError(f"message {number} needs a 'role' and a text 'content', not {_shown(message)}")
        if message.get("role") not in ROLES:
            raise BadRecordError(f"message {number} has the role {message.get('role')!r}; known are {', '.join(ROLES)}")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _text(fields: dict[str, Any], name: str) -> str:
    if fields.get(name) is None:
        raise BadRecordError(f"it has no {name!r}")
    if not isinstance(fields[name], str):
        raise BadRecordError(f"{name!r} must be text, not {_shown(fields[name])}")
    text: str = fields[name]
    return text


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"

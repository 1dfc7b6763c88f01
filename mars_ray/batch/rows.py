"""One row to decode.

In:    the JSON text of a row, with `prompt` or `messages`, and perhaps `id`.
Out:   a `Row`, or a `BadRecordError` that says what is wrong with it.
Never: reads files, knows a tokenizer.
"""

import hashlib
import json
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

from mars_ray.data.records import Message, parse_messages, parse_object
from mars_ray.errors import BadRecordError


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation that waits for its answer."""

    id: str
    """The row's own, or a hash of its content: the same row has the same id in every run."""
    prompt: str
    """What the output shows as the question: the prompt, or the last message of the user."""
    messages: tuple[Message, ...]


def parse_row(raw: bytes) -> Row:
    """Parse one row. Raises `BadRecordError` with the reason."""
    try:
        fields = parse_object(raw)
        messages = _messages(fields)
        row = Row(id=_given_id(fields) or _content_hash(fields), prompt=_last_question(messages), messages=messages)
    except RecursionError:  # JSON that could just be parsed may be too deep to write again
        raise BadRecordError(f"it is nested too deeply: {raw[:60]!r}") from None
    try:
        "".join((row.id, *(message["content"] for message in messages))).encode()
    except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair, which is no character
        raise BadRecordError(f"its text is not Unicode ({error.reason})") from None
    return row


def given_id(raw: bytes) -> str | None:
    """Return the id in `raw`, however bad the rest of it; None when there is none to be used."""
    try:
        found = _given_id(parse_object(raw))
        (found or "").encode()
    except (BadRecordError, RecursionError, UnicodeEncodeError):
        return None
    return found


def _given_id(fields: dict[str, Any]) -> str | None:
    value = fields.get("id")
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return None if value in (None, "") else str(value)
    raise BadRecordError(f"'id' must be text or an integer, not {type(value).__name__} {shortened(value)}")


def _content_hash(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _messages(fields: dict[str, Any]) -> tuple[Message, ...]:
    # Columns of parquet exist in every row: one that is null is one that is not there.
    prompt = fields.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise BadRecordError(f"'prompt' must be text, not {type(prompt).__name__} {shortened(prompt)}")
    if fields.get("messages") is not None:
        messages = parse_messages(fields["messages"])
    elif prompt is not None:
        messages = ({"role": "user", "content": prompt},)
    else:
        raise BadRecordError(f"it has neither 'prompt' nor 'messages', only {shortened(sorted(fields))}")
    if messages[-1]["role"] == "assistant":
        raise BadRecordError("its last message is the assistant's: there is nothing left to answer")
    if not messages[-1]["content"].strip():
        raise BadRecordError("its prompt is empty")
    return messages


def _last_question(messages: tuple[Message, ...]) -> str:
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return asked[-1] if asked else messages[-1]["content"]

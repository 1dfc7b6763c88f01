"""Read prompts of records as conversations to answer, and files of such records.

In:    JSON objects with `messages`, as a list or its JSON text, or with `prompt`, as text or messages.
Out:   checked messages, the last of which can be answered.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from reprlib import repr as shortened
from typing import Any, TypeVar

from mars_ray.chat.conversation import read_messages
from mars_ray.data.record_file import check_source, read_records
from mars_ray.data.records import Message, json_value, parse_object, turns_of
from mars_ray.errors import BadRecordError, DataError, EmptyDataError, RequestError
from mars_ray.storage.location import AnyPath

T = TypeVar("T")
Conversation = tuple[Message, ...]

PROMPT_COLUMNS = ("messages", "prompt")
"""Columns that hold the prompt, unless a setting names another one; the first that is not null counts."""
READ_RECORDS = 256


def parsed_records(path: AnyPath, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """Return what `parse` makes of each record of a file. Raises a `DataError` that names the first unusable record."""
    check_source(path)
    parsed: list[T] = []
    for raw in chain.from_iterable(read_records(path, READ_RECORDS)):
        try:
            parsed.append(parse(parse_object(raw)))
        except (BadRecordError, RequestError) as error:
            raise DataError(f"{path}, record {len(parsed) + 1}: {str(error).removesuffix('.')}.") from None
    return parsed


def read_prompts(path: AnyPath) -> list[Conversation]:
    """Read all prompts. Raises a `DataError` that names the first unusable record."""
    prompts = parsed_records(path, prompt_of)
    if not prompts:
        raise EmptyDataError(f"{path} holds no prompt.")
    return prompts


def raw_messages(fields: Mapping[str, Any], column: str | None = None) -> tuple[str, Any]:
    """Return the messages of a record before they are checked, and the name of their column.

    `column` is the only column to read; None means `messages`, or `prompt` in records without `messages`. Raises
    `BadRecordError` for a record without either, and `RequestError` for a text that is no Unicode.
    """
    names = PROMPT_COLUMNS if column is None else (column,)
    # In parquet every row has every column, so a null column may stand beside the one with the messages.
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        if null := next((name for name in names if name in fields), None):
            raise BadRecordError(f"its {null!r} is null", missing=names)
        missing = "neither 'prompt' nor 'messages'" if column is None else f"no {column!r}"
        raise BadRecordError(f"it has {missing}, only {shortened(sorted(fields))}", missing=names)
    if name == "messages":
        return name, json_value(fields[name])
    return name if isinstance(fields[name], list) else "messages", turns_of(fields, name, "user")


def prompt_of(fields: Mapping[str, Any], column: str | None = None, *, answered: bool = True) -> Conversation:
    """Return the conversation of a record. With `answered` an answer follows, so the last message must allow one.

    Raises `BadRecordError` and `RequestError` with the reason if there is none to answer.
    """
    name, value = raw_messages(fields, column)
    messages = read_messages(value, name, answered=answered)
    last = messages[-1]
    if last["role"] == "assistant" and answered:
        raise BadRecordError("its last message is the assistant's, so there is nothing to answer")
    if last["role"] != "tool" and not last["content"].strip() and not last.get("tool_calls"):
        raise BadRecordError("its prompt is empty")
    return messages

"""Read a file of prompts as conversations to answer. The first bad record raises an error that names it."""

from collections.abc import Mapping
from itertools import count, islice
from typing import Any

from mars_ray.data.record_file import check_source, read_records
from mars_ray.data.records import Message, parse_messages, parse_object
from mars_ray.errors import BadRecordError, DataError, EmptyDataError
from mars_ray.storage.location import AnyPath

Conversation = tuple[Message, ...]

READ_RECORDS = 256


def read_prompts(path: AnyPath) -> list[Conversation]:
    """Read all prompts. Raises a `DataError` that names the first unusable record, if there is one."""
    check_source(path)
    numbers = count(1)
    prompts = [
        _conversation(path, number, raw)
        for chunk in read_records(path, READ_RECORDS)
        for number, raw in zip(islice(numbers, len(chunk)), chunk, strict=True)
    ]
    if not prompts:
        raise EmptyDataError(f"{path} holds no prompt.")
    return prompts


def messages_of(fields: Mapping[str, Any]) -> Any:
    """Return the `messages` of a record, or its `prompt` as a message."""
    # In parquet every row has every column, so null means that a field is absent.
    messages = fields.get("messages")
    return [{"role": "user", "content": fields.get("prompt")}] if messages is None else messages


def _conversation(path: AnyPath, number: int, raw: bytes) -> Conversation:
    try:
        fields = parse_object(raw)
        parsed = parse_messages(messages_of(fields))
        if not parsed[-1]["content"].strip():
            raise BadRecordError("its prompt is empty")
    except BadRecordError as error:
        raise DataError(f"{path}, record {number}: {error}. Each record needs 'prompt' or 'messages'.") from None
    return parsed

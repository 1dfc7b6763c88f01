"""Read the first questions of conversations: the messages before the first answer."""

import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from mars_ray.chat.conversation import read_messages
from mars_ray.data.dropped_records import DroppedRecords
from mars_ray.data.prompt_file import raw_messages
from mars_ray.data.record_file import read_records
from mars_ray.data.records import Message, parse_object
from mars_ray.errors import BadRecordError, RequestError

RECORDS_AT_ONCE = 1024


def questions(source: Path, count: int, max_dropped: float) -> list[Sequence[Message]]:
    """Return the messages before the first answer of the first `count` valid conversations.

    Reports the records without such messages. Raises `DataError` if their share is above `max_dropped`.
    """
    prompts: list[Sequence[Message]] = []
    dropped = DroppedRecords()
    records = (raw for chunk in read_records(source, RECORDS_AT_ONCE) for raw in chunk)
    for number, raw in enumerate(records, start=1):
        try:
            prompts.append(_question(raw))
        except (BadRecordError, RequestError) as error:
            dropped.add(str(error), number)
        if len(prompts) == count:
            break
    report_dropped(source, len(prompts) + dropped.total, dropped, max_dropped)
    return prompts


def _question(raw: bytes) -> Sequence[Message]:
    name, value = raw_messages(parse_object(raw))
    messages = read_messages(value, name, answered=False)
    prompt = list(takewhile(lambda message: message["role"] != "assistant", messages))
    if not prompt or not prompt[-1]["content"].strip():
        raise BadRecordError("it has no prompt before its first answer")
    return prompt


def report_dropped(source: Path, records: int, dropped: DroppedRecords, max_dropped: float) -> None:
    """Print how many records were dropped. Raises `DataError` if their share is above `max_dropped`."""
    dropped.check(str(source), records, max_dropped)
    if dropped.total:
        print(dropped.summary(source.name, records), file=sys.stderr)

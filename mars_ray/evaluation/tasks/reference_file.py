"""Read a file of prompts with references. A record has `prompt` or `messages`, `reference`, and optionally `match`.

The first bad record raises an error that names the file and the line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import isfinite
from reprlib import repr as shortened
from typing import Any

import regex

from mars_ray.data.prompt_file import Conversation, prompt_of
from mars_ray.data.record_file import PARQUET, check_source, read_records
from mars_ray.data.records import parse_object
from mars_ray.data.tasks.checks import same_json
from mars_ray.errors import BadRecordError, ConfigError, DataError, EmptyDataError, RequestError
from mars_ray.evaluation.tasks.verify import FILE_MATCHES
from mars_ray.storage.location import AnyPath

READ_RECORDS = 256


@dataclass(frozen=True, slots=True)
class Referenced:
    """A prompt, and the reference that its answer is compared with."""

    messages: Conversation
    reference: str
    match: str


def read_references(path: AnyPath, match: str) -> list[Referenced]:
    """Read all records; `match` applies to records that do not set one.

    Raises a `ConfigError` for an unknown match, and a `DataError` that names the first unusable record.
    """
    if match not in FILE_MATCHES:
        raise ConfigError(f"match is {match!r}, must be one of {', '.join(FILE_MATCHES)}.")
    check_source(path)
    records = []
    for location, raw in numbered(path):
        try:
            records.append(_record(parse_object(raw), match))
        except (BadRecordError, RequestError) as error:
            raise DataError(f"{path}, {location}: {str(error).removesuffix('.')}.") from None
    if not records:
        raise EmptyDataError(f"{path} has no record.")
    return records


def numbered(path: AnyPath) -> Iterator[tuple[str, bytes]]:
    """Yield the records, each with its line or record number."""
    numbers = count(1)
    if path.suffix == PARQUET or path.suffix in (".gz", ".zst"):
        for chunk in read_records(path, READ_RECORDS):
            yield from ((f"record {next(numbers)}", raw) for raw in chunk)
    else:  # a text file, whose empty lines are skipped
        with path.open("rb") as file:
            yield from ((f"line {number}", raw) for number, raw in zip(numbers, file, strict=False) if raw.strip())


def _record(fields: dict[str, Any], default: str) -> Referenced:
    messages = prompt_of(fields)
    match = default if fields.get("match") is None else fields["match"]
    if not isinstance(match, str) or match not in FILE_MATCHES:
        raise BadRecordError(f"its match is {shortened(match)}, must be one of {', '.join(FILE_MATCHES)}")
    if fields.get("reference") is None:
        raise BadRecordError("it has no 'reference' to compare the answer with")
    return Referenced(messages, _reference(fields["reference"], match), match)


def _reference(value: Any, match: str) -> str:
    if match == "json":
        # A string is JSON source; any other value is the JSON value itself.
        text = value if isinstance(value, str) else json.dumps(value)
        if not same_json(text, text):
            raise BadRecordError(f"its reference is not JSON, or has a key twice: {shortened(value)}")
        return text
    not_finite = isinstance(value, float) and not isfinite(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not_finite:
        kind = type(value).__name__
        raise BadRecordError(f"its reference is {kind} {shortened(value)}; match {match} compares with text")
    # White space around answers is ignored, so it is removed here, too.
    text = str(value) if match == "regex" else str(value).strip()
    if match == "regex":
        try:
            matches_empty = regex.search(text, "") is not None
        except regex.error as error:
            raise BadRecordError(f"its reference is not a regular expression ({error}): {shortened(value)}") from None
        if matches_empty:
            raise BadRecordError(f"its reference matches every answer, even an empty one: {shortened(value)}")
    elif not text:
        raise BadRecordError("its reference is empty")
    return text

"""Interface of row formats, which turn the JSON text of a row into a request, and answers into output records."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mars_ray.data.arrow_json import BLOB, BYTES
from mars_ray.data.records import parse_object
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.errors import BadRecordError
from mars_ray.openai_api.answer_plan import AnswerPlan

JsonRecord = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRow:
    """A row that can be decoded."""

    id: str
    """Id given in the row, or an id made from the row's content."""
    request: Request
    """Request for the engine. The worker replaces its id."""
    prompt_text: str
    """Text of the prompt to show in the output."""
    columns: JsonRecord
    """Columns of the row, for use in `output_records`."""
    plan: AnswerPlan | None = None
    """How a chat answer is parted into reasoning, content and tool calls."""


class RowFormat(Protocol):
    """Parses the rows of one format and formats their results."""

    def parse(self, id: str, raw: bytes) -> ParsedRow:
        """Parse a row. Raises `BadRecordError` or `RequestError` with the reason."""

    def output_records(self, row: ParsedRow, answers: Sequence[Chunk]) -> list[JsonRecord]:
        """Return the output records of a row. Each answer is one chunk that holds the whole sequence."""

    def error_record(self, id: str, raw: bytes, error: Exception) -> JsonRecord:
        """Return the record for the errors file."""


def parse_row(raw: bytes) -> JsonRecord:
    """Return the columns of a row, with None in place of NaN and infinity. Raises `BadRecordError` for a malformed
    row.

    The text of a column may be invalid Unicode, because the column may be unused; `check_text` checks used columns.
    """
    try:
        text = json.dumps(parse_object(raw))
    except RecursionError:  # JSON that can be parsed may still be too deep to write
        raise BadRecordError(f"it is nested too deeply: {raw[:60]!r}") from None
    columns: JsonRecord = json.loads(text, parse_constant=lambda _: None)
    return columns


def check_text(columns: JsonRecord, *names: str) -> None:
    """Raise `BadRecordError` if the text in one of these columns is not valid Unicode."""
    for name in names:
        if name in columns and (fault := text_fault(json.dumps(columns[name], ensure_ascii=False))):
            raise BadRecordError(f"{name!r} is not valid Unicode: it has {fault}")


def text_fault(text: str) -> str | None:
    """Return the part of a text that is not valid Unicode, in words; None if the text is valid."""
    try:
        text.encode()
    except UnicodeEncodeError:  # a JSON escape can spell half of a surrogate pair
        return "bytes that are not UTF-8 text" if BYTES in text or BLOB in text else "half of a surrogate pair"
    return None

"""The interface of row formats: JSON text of a row to a request, and answers to records of the output."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mars_ray.data.records import parse_object
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.errors import BadRecordError

JsonRecord = dict[str, Any]
"""A JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRow:
    """A row that can be decoded."""

    id: str
    """The row's own id, or the one made from its content."""
    request: Request
    """The request to the engine. Its id is replaced."""
    prompt_text: str
    """The prompt as the output shows it."""
    columns: JsonRecord
    """The columns of the row, which the output keeps."""


class RowFormat(Protocol):
    """Parses the rows of one format and formats their results."""

    def parse(self, id: str, raw: bytes) -> ParsedRow:
        """Return the row. Raises `BadRecordError` or `RequestError` with the reason."""

    def output_records(self, row: ParsedRow, answers: Sequence[Chunk]) -> list[JsonRecord]:
        """Return the records of the output. Each answer is the one chunk of a sequence that was not streamed."""

    def error_record(self, id: str, raw: bytes, error: Exception) -> JsonRecord:
        """Return the record of the errors file."""


def parse_row(raw: bytes) -> JsonRecord:
    """Return the columns of a row, with null for NaN and infinity. Raises `BadRecordError`."""
    try:
        text = json.dumps(parse_object(raw), ensure_ascii=False)
        text.encode()
    except RecursionError:  # JSON that could be parsed may be too deep to be written
        raise BadRecordError(f"it is nested too deeply: {raw[:60]!r}") from None
    except UnicodeEncodeError:  # from a JSON escape
        raise BadRecordError("its text is not Unicode: half of a surrogate pair is no character") from None
    columns: JsonRecord = json.loads(text, parse_constant=lambda _: None)
    return columns

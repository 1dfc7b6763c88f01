"""What the rows of a job look like on their way in and on their way out: the interface of all row formats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request

JsonRecord = dict[str, Any]
"""A JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRow:
    """A row that can be decoded."""

    id: str
    """The row's own id, or the one made from its content."""
    request: Request
    """The request to the engine, under any id."""
    prompt_text: str
    """The question as the output shows it."""
    columns: JsonRecord
    """The row's own columns, which the output keeps."""


class RowFormat(Protocol):
    """One kind of rows. It is made in the process that uses it, from settings that can be sent there."""

    def parse(self, id: str, raw: bytes) -> ParsedRow:
        """Return the row. Raises `BadRecordError` or `RequestError` with the reason."""

    def output_records(self, row: ParsedRow, answers: Sequence[Chunk]) -> list[JsonRecord]:
        """Return the records of the output. Each answer is the one chunk of a sequence that was not streamed."""

    def error_record(self, id: str, raw: bytes, error: Exception) -> JsonRecord:
        """Return the record of the errors file."""

"""Interface of row formats, which turn the JSON text of a row into a request, and answers into output records."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mars_ray.data.records import parse_object
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.errors import BadRecordError, MarsRayError
from mars_ray.openai_api.answer_plan import AnswerPlan

if TYPE_CHECKING:
    from mars_ray.batch.rows.row_ids import RowId
    from mars_ray.model.folder import ResolvedModel

log = logging.getLogger(__name__)

JsonRecord = dict[str, Any]

FLOAT64 = range(-(2**53), 2**53 + 1)
"""Integers that float64 represents exactly."""


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
    """Plan that parts a chat answer into reasoning, content and tool calls."""


class RowFormat(Protocol):
    """Parses the rows of one format and formats their results."""

    def parse(self, id: str, raw: bytes) -> ParsedRow:
        """Parse a row. Raises `BadRecordError` or `RequestError` with the reason."""

    def output_records(self, row: ParsedRow, answers: Sequence[Chunk]) -> list[JsonRecord]:
        """Return the output records of a row. Each answer is one chunk that holds the whole sequence."""

    def error_record(self, row_id: "RowId", raw: bytes, error: Exception) -> JsonRecord:
        """Return the record for the errors file."""


def parsed_row(row_format: RowFormat, id: str, raw: bytes) -> ParsedRow:
    """Parse a row as `RowFormat.parse` does. An unexpected error is an error of the row, because it must not stop the
    others."""
    try:
        return row_format.parse(id, raw)
    except MarsRayError:
        raise
    except Exception as error:
        log.exception("a row cannot be read: %.200r", raw)
        raise BadRecordError(f"it cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


class RowFormatSettings(Protocol):
    """Settings of a row format, which travel to the workers."""

    id_column: ClassVar[str]
    """Column with the id that a row may give itself."""

    def open(self, model: "ResolvedModel") -> RowFormat:
        """Return the row format with the tokenizer of a model, without loading weights.

        Raises `ModelError` for an unusable model, and `ConfigError` for an invalid template.
        """


def parse_row(raw: bytes) -> JsonRecord:
    """Return the columns of a row, with None in place of NaN and infinity. Raises `BadRecordError` for a malformed
    row.

    The text of a column may be invalid Unicode, because the column may be unused.
    """
    return parse_object(raw, _FINITE)


def without_fraction(value: Any) -> Any:
    """Return a whole number that is stored as a float as an integer, and any other value as it is.

    Tables store an integer column with nulls as floats.
    """
    if isinstance(value, float) and value.is_integer() and int(value) in FLOAT64:
        return int(value)
    return value


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


_FINITE = json.JSONDecoder(parse_float=_finite, parse_constant=lambda _: None)

"""What the rows of a job look like, on their way in and on their way out.

In:    the JSON text of a row; later its answers, or the reason why there are none.
Out:   a request to the engine; records for the output, or for the errors file.
Never: reads or writes files, knows the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mars_ray.batch.rows.answer import Answer
from mars_ray.engine.request import Request

Record = dict[str, Any]
"""JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row that can be decoded."""

    id: str
    """The row's own, or the one made from its content."""
    request: Request
    """Under any id."""
    shown: str
    """What the output shows as the question."""
    columns: Record
    """The row's own, to be kept."""


class Form(Protocol):
    """A kind of rows. Made in the process that uses it, from settings that travel."""

    def parse(self, id: str, raw: bytes) -> Row:
        """Return the row. Raises `BadRecordError` or `RequestError` with the reason."""

    def answered(self, row: Row, answers: Sequence[Answer]) -> list[Record]:
        """Return the records of the output."""

    def refused(self, id: str, raw: bytes, error: Exception) -> Record:
        """Return the record of the errors file."""

"""Give each row of an input an id for the output and a unique key for the ledger.

Ids and keys depend only on the input, so the outputs of several jobs with the same input can be joined by id.
Occurrences of each id are counted in a temporary SQLite file, so memory does not grow with the input. The system
removes the file when the process ends.
"""

import hashlib
import json
import math
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Self

from mars_ray.batch.rows.row_format import JsonRecord, without_fraction
from mars_ray.chat.unicode_text import text_fault
from mars_ray.errors import BadRecordError, RunError

CACHE_KIB = 16 * 1024
"""Size of the memory cache for the temporary file, in KiB."""
ID_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowId:
    """Id and key of one row."""

    key: bytes
    """Key of 16 bytes, unique within the input."""
    id: str
    """Id given in the row, or a hash of the row's content. If several rows have the same hash, the k-th has the suffix
    "-k" from the second on."""
    is_own: bool = False
    """True if the row itself specifies the id."""
    repeated: bool = False
    """True if the row specifies an id that an earlier row already used."""


class RowIdAssigner:
    """Assigns ids to the rows of one input. Use it as a context manager and in one thread.

    `column` is the column with the id that a row may give itself.
    """

    def __init__(self, column: str) -> None:
        self._column = column
        # With an empty name, SQLite creates a temporary file and removes it when the connection closes.
        self._seen = sqlite3.connect("", isolation_level=None)
        self._seen.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -{CACHE_KIB};"
            "CREATE TABLE seen (key BLOB PRIMARY KEY, times INTEGER) WITHOUT ROWID; BEGIN"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._seen.close()

    def assign(self, raw: bytes, columns: JsonRecord | None) -> RowId:
        """Return the id of the next row; `columns` is None for an invalid row. Raises `RunError` if the disk is
        full."""
        own_id = None
        with suppress(BadRecordError):
            own_id = None if columns is None else id_in(columns, self._column)
        is_own = own_id is not None
        id = _content_hash(raw, columns) if own_id is None else own_id
        kind = "given" if is_own else "made"
        first_key = _key(kind, 1, id)
        try:
            times = self._count(first_key)
        except sqlite3.Error as error:
            raise RunError(f"Cannot count ids in a temporary file: {error}. Make room, or set TMPDIR.") from error
        return RowId(
            key=first_key if times == 1 else _key(kind, times, id),
            id=id if times == 1 or is_own else f"{id}-{times}",
            is_own=is_own,
            repeated=times > 1 and is_own,
        )

    def _count(self, key: bytes) -> int:
        """Count a row with this key, and return the number of rows with this key so far, including this one."""
        [(times,)] = self._seen.execute(
            "INSERT INTO seen VALUES (?, 1) ON CONFLICT DO UPDATE SET times = times + 1 RETURNING times", (key,)
        )
        return int(times)


def id_in(fields: JsonRecord, column: str) -> str | None:
    """Return the id in a column, or None if it is missing. Raises `BadRecordError` for an unusable id.

    NaN is null, because pandas stores an integer column with nulls as floats, and null as NaN.
    """
    value = fields.get(column)
    if value in (None, "") or (isinstance(value, float) and not math.isfinite(value)):
        return None
    value = without_fraction(value)
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise BadRecordError(f"{column!r} must be text or an integer, not {type(value).__name__} {shortened(value)}")
    if fault := text_fault(str(value)):
        raise BadRecordError(f"{column!r} is not valid Unicode: it has {fault}")
    return str(value)


def _content_hash(raw: bytes, columns: JsonRecord | None) -> str:
    """Return a hash of the row's columns, without null columns. The order of the columns does not matter."""
    content = raw
    if columns is not None:
        fields = {name: value for name, value in columns.items() if value is not None}
        with suppress(RecursionError):
            content = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(content).hexdigest()[:ID_DIGITS]


def _key(kind: str, times: int, id: str) -> bytes:
    return hashlib.blake2b(f"{kind} {times} {id}".encode(), digest_size=16).digest()

"""Give each row of an input an id to show, and a key that no other row of the input has.

The same input gives the same ids and keys in every run and in every job, whatever the model and the settings, so the
outputs of jobs over one input can be joined by id. That a job goes on with the settings it began with is the ledger's
concern. No row is refused or kept, so memory does not grow with the input.

How often each id came is counted in a temporary file of SQLite, which is gone with the process, however it ends.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any, Self

from mars_ray.data.records import parse_object
from mars_ray.errors import BadRecordError, RunError

CACHE_KIB = 16 * 1024
"""Part of the file that is kept in memory."""
ID_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowId:
    """The id and the key of one row."""

    key: bytes
    """16 bytes that no other row of the input has."""
    id: str
    """The row's own id, or a hash of its content; the k-th row of the same content has "-k" behind it."""
    repeated: bool
    """An earlier row came with the same id of its own."""


class RowIdAssigner:
    """Gives ids to the rows of one input; use as a context manager and within one thread.

    `own_id` returns the id a row has, if any.
    """

    def __init__(self, own_id: Callable[[bytes], str | None]) -> None:
        self._own_id = own_id
        # A file without a name is one that the system removes when it is closed.
        self._seen = sqlite3.connect("", isolation_level=None)
        self._seen.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -{CACHE_KIB};"
            "CREATE TABLE seen (key BLOB PRIMARY KEY, times INTEGER) WITHOUT ROWID; BEGIN"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._seen.close()

    def assign(self, raws: Sequence[bytes]) -> list[RowId]:
        """Return the ids of the next rows. Raises `RunError` when the disk is full."""
        try:
            return [self._row_id(raw) for raw in raws]
        except sqlite3.Error as error:
            raise RunError(f"Cannot count ids in a temporary file: {error}. Make room, or set TMPDIR.") from error

    def _row_id(self, raw: bytes) -> RowId:
        given = self._own_id(raw)
        id = _content_hash(raw) if given is None else given
        kind = "made" if given is None else "given"
        times = self._times(_key(kind, 1, id))
        return RowId(
            key=_key(kind, times, id),
            id=id if times == 1 or given else f"{id}-{times}",
            repeated=times > 1 and given is not None,
        )

    def _times(self, key: bytes) -> int:
        """Count one more row with this key and return how many there are."""
        [(times,)] = self._seen.execute(
            "INSERT INTO seen VALUES (?, 1) ON CONFLICT DO UPDATE SET times = times + 1 RETURNING times", (key,)
        )
        return int(times)


def own_id(raw: bytes, column: str) -> str | None:
    """Return the id in a column of a row, however bad the rest of it; None when there is none to be used."""
    try:
        return id_in(parse_object(raw), column)
    except BadRecordError:
        return None


def id_in(fields: dict[str, Any], column: str) -> str | None:
    """Return the id in a column, None when there is none. Raises `BadRecordError` for one that is not usable."""
    value = fields.get(column)
    if value in (None, ""):
        return None
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise BadRecordError(f"{column!r} must be text or an integer, not {type(value).__name__} {shortened(value)}")
    try:
        str(value).encode()
    except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair, which is no character
        raise BadRecordError(f"{column!r} is not Unicode ({error.reason})") from None
    return str(value)


def _content_hash(raw: bytes) -> str:
    """Return a hash of what the row says, whatever the order of its columns; one that is null is not there."""
    try:
        fields = {name: value for name, value in parse_object(raw).items() if value is not None}
        content = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    except (BadRecordError, RecursionError):
        content = raw
    return hashlib.sha256(content).hexdigest()[:ID_DIGITS]


def _key(kind: str, times: int, id: str) -> bytes:
    return hashlib.blake2b(f"{kind} {times} {id}".encode(), digest_size=16).digest()

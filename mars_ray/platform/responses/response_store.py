"""Finished responses in SQLite, so that later requests can retrieve, continue and delete them.

In:    responses of owners, as JSON; ids. An owner is an account, or empty without keys.
Out:   the responses of the same owner.
Never: holds more bytes than its bounds, keeps a response longer than its time, or drops a newer response of an owner
       before an older one. The response of another owner is as unknown as one that does not exist.
"""

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.errors import RequestError, ResponseNotFoundError, UnavailableError
from mars_ray.storage.private import private_folder

DAY_SECONDS = 86_400.0

ROW_BYTES = 1024
"""Bytes counted for each response in addition to its texts, so that the number of responses has a bound too."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response with its input."""

    id: str
    previous: str | None
    """Id of the response that this one continues."""
    input: str
    """The items of its input, as a JSON list."""
    response: str
    """The response object, as JSON."""

    @property
    def bytes(self) -> int:
        """Bytes that count towards the bounds."""
        return len(self.input.encode()) + len(self.response.encode()) + ROW_BYTES


@dataclass(frozen=True, slots=True)
class Turn:
    """Input and output of one response of a conversation, each as a JSON list of items."""

    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBounds:
    """Bounds of a store."""

    seconds: float = DAY_SECONDS
    """Seconds that a response is kept."""
    owner_bytes: int = 64 * 2**20
    """Maximum bytes of one owner."""
    total_bytes: int = 512 * 2**20
    """Maximum bytes of all owners together."""
    chain: int = 512
    """Maximum responses of one conversation."""


class ResponseStoreClient(Protocol):
    """Client of a store, wherever it runs. All methods raise `UnavailableError` if the store does not answer."""

    async def put(self, owner: str, stored: StoredResponse) -> bool:
        """Store a response and return whether it fits the bounds."""

    async def get(self, owner: str, id: str) -> str:
        """Return a response object as JSON. Raises `ResponseNotFoundError`."""

    async def delete(self, owner: str, id: str) -> None:
        """Delete a response. Raises `ResponseNotFoundError`."""

    async def chain(self, owner: str, id: str, max_bytes: int) -> list[Turn]:
        """Return the conversation that ends with a response, see `ResponseStore.chain`."""


_SCHEMA = """
PRAGMA synchronous = OFF;
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, previous TEXT, created_s REAL NOT NULL,
    bytes INTEGER NOT NULL, input TEXT NOT NULL, response TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_owner ON responses (owner, number);
CREATE INDEX IF NOT EXISTS by_age ON responses (created_s);
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO owners VALUES (NEW.owner, NEW.bytes) ON CONFLICT (owner) DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE owners SET bytes = bytes - OLD.bytes WHERE owner = OLD.owner;
    DELETE FROM owners WHERE owner = OLD.owner AND bytes = 0;
END;
"""
# A killed process loses nothing without synchronous writes. A node without power loses the whole store anyway.


class ResponseStore:
    """The responses in one folder. Use it in one thread at a time.

    `clock` returns the Unix time in seconds. All methods raise `UnavailableError` if SQLite fails.
    """

    def __init__(
        self, folder: Path, bounds: StoreBounds = StoreBounds(), clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = private_folder(folder)
        self._bounds = bounds
        self._clock = clock
        self._database = sqlite3.connect(folder / "responses.sqlite", check_same_thread=False)
        with self._transaction():
            self._database.executescript(_SCHEMA)

    def put(self, owner: str, stored: StoredResponse) -> bool:
        """Store a response and drop the oldest ones beyond the bounds. Return False if it alone exceeds a bound."""
        bounds = self._bounds
        if stored.bytes > min(bounds.owner_bytes, bounds.total_bytes):
            return False
        row = (stored.id, owner, stored.previous, self._clock(), stored.bytes, stored.input, stored.response)
        with self._transaction():
            self._drop_expired()
            self._database.execute(
                "INSERT INTO responses (id, owner, previous, created_s, bytes, input, response) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            while self._sum("SELECT bytes FROM owners WHERE owner = ?", owner) > bounds.owner_bytes:
                self._database.execute(
                    "DELETE FROM responses WHERE number = (SELECT MIN(number) FROM responses WHERE owner = ?)", (owner,)
                )
            while self._sum("SELECT SUM(bytes) FROM owners") > bounds.total_bytes:
                self._database.execute("DELETE FROM responses WHERE number = (SELECT MIN(number) FROM responses)")
        return True

    def get(self, owner: str, id: str) -> str:
        """Return a response object as JSON. Raises `ResponseNotFoundError`."""
        with self._transaction():
            [response] = self._row("response", owner, id)
        return response

    def delete(self, owner: str, id: str) -> None:
        """Delete a response. Raises `ResponseNotFoundError`."""
        with self._transaction():
            self._row("id", owner, id)
            self._database.execute("DELETE FROM responses WHERE id = ?", (id,))

    def chain(self, owner: str, id: str, max_bytes: int) -> list[Turn]:
        """Return the turns of the conversation that ends with a response, oldest first.

        Raises `ResponseNotFoundError` if one of its responses is missing, and `RequestError` if it has more than
        `max_bytes` or more responses than the bound.
        """
        turns: list[Turn] = []
        room = max_bytes
        wanted: str | None = id
        with self._transaction():
            while wanted is not None:
                columns = "previous, input, json_extract(response, '$.output')"
                wanted, input_items, output = self._row(columns, owner, wanted)
                turns.append(Turn(input_items, output))
                room -= len(input_items.encode()) + len(output.encode())
                if room < 0 or len(turns) > self._bounds.chain:
                    raise RequestError(
                        f"the conversation that ends with {id[:NAME_CHARS]!r} is too long to continue: it has more "
                        f"than {self._bounds.chain} responses or {max_bytes} bytes. Start a new one with the items "
                        "that matter in input."
                    )
        return turns[::-1]

    def drop_expired(self) -> bool:
        """Drop the expired responses, and return whether the store is empty."""
        with self._transaction():
            self._drop_expired()
            return self._sum("SELECT COUNT(*) FROM owners") == 0

    def remove(self) -> None:
        """Close the store and delete its folder."""
        self._database.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drop_expired(self) -> None:
        self._database.execute("DELETE FROM responses WHERE created_s <= ?", (self._expired_s(),))

    def _expired_s(self) -> float:
        return self._clock() - self._bounds.seconds

    def _row(self, columns: str, owner: str, id: str) -> tuple[str, ...]:
        row: tuple[str, ...] | None = self._database.execute(
            f"SELECT {columns} FROM responses WHERE id = ? AND owner = ? AND created_s > ?",
            (id, owner, self._expired_s()),
        ).fetchone()
        if row is None:
            raise ResponseNotFoundError(
                f"Response with id {id[:NAME_CHARS]!r} not found: it was not stored, has been deleted, or was dropped "
                "because of its age or for newer ones."
            )
        return row

    def _sum(self, query: str, *values: str) -> int:
        row = self._database.execute(query, values).fetchone()
        return int(row[0] or 0) if row else 0

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self._database:
                yield
        except sqlite3.Error as error:
            raise UnavailableError("the store of responses cannot be read or written. Try again later.") from error


def remove_stale(folder: Path, seconds: float = DAY_SECONDS) -> None:
    """Delete the stores below a folder that no process has written to for longer than responses are kept."""
    for store in folder.iterdir():
        with suppress(OSError):  # another process may delete the same files
            if max(path.stat().st_mtime for path in (store, *store.iterdir())) < time.time() - seconds:
                shutil.rmtree(store, ignore_errors=True)

"""The ledger of a job: which rows are done, and what of them does not lie in an output file yet.

In:    settings, results, names of output files.
Out:   what is left to do; the same after any kill, for everything that belongs together is one transaction.
Never: counts a row twice, forgets one, goes on with other settings.

One process writes: the driver. Workers that outlive a killed driver have nobody to hand their results to, so nothing
of theirs can arrive late. Others may read (`undone`).
"""

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from mars_ray.batch.rows.row_tables import RowResult
from mars_ray.errors import ConfigError, OutputError, RunError
from mars_ray.storage.location import AnyPath

TABLES = """
CREATE TABLE IF NOT EXISTS setting (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS done (key BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lately (keys BLOB);
CREATE TABLE IF NOT EXISTS record (number INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE IF NOT EXISTS error (key BLOB PRIMARY KEY, kind TEXT, text TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS example (kind TEXT PRIMARY KEY, reason TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shard (name TEXT PRIMARY KEY, records INTEGER) WITHOUT ROWID;
"""
"""Tables of the database; `record` holds what is not in a shard yet, `example` one reason of each kind of error.

A row is done once its key stands in `done` or, end to end with those that came with it, in `lately`. Keys are hashes,
so each belongs to another page of `done`: they go there many at a time, and in order.
"""
KEY_BYTES = 16
LATELY = 10_000
"""Keys in `lately` before they go to `done`."""

KIND_CHARS = 200
"""Characters in which reasons of different kinds differ."""

LEDGER = Path(".job") / "ledger.sqlite"
"""Where the ledger of a job lies in its folder."""


class Ledger:
    """The ledger at `path`, made where there is none, of the job in the folder `of`."""

    def __init__(self, path: Path, *, of: AnyPath, durable: bool) -> None:
        """Open it. Raises `OutputError` when that is not possible.

        With `durable`, what was written survives a power cut.
        """
        self.path, self._job = path, of
        try:
            self.connection = sqlite3.connect(path, isolation_level=None)
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
            self.connection.executescript(TABLES)
            self._lately = _lately(self.connection)
        except sqlite3.Error as error:
            raise OutputError(f"{path} is no ledger that can be used: {error}. Give another output folder.") from error

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Keep the settings of a new job; raises `ConfigError` naming what differs from those the job began with."""
        kept = self.settings()
        for name, value in settings.items():
            if kept and kept.get(name) != value:
                raise ConfigError(
                    f"the job in {self._job} began with other settings: {name} was "
                    f"{json.dumps(kept.get(name))}, now it is {json.dumps(value)}. Use the old one, give another "
                    "output, or --new to begin again."
                )
        with self.transaction():
            self.connection.executemany(
                "INSERT OR REPLACE INTO setting VALUES (?, ?)",
                [(name, json.dumps(value)) for name, value in settings.items()],
            )

    def settings(self) -> dict[str, Any]:
        """Return what the job began with; nothing where it begins now."""
        return {name: json.loads(value) for name, value in self.connection.execute("SELECT * FROM setting")}

    def setting(self, name: str) -> Any:
        """Return what the job began with; None where it begins now."""
        return self.settings().get(name)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make what is written meanwhile one transaction. Raises `RunError` when it cannot be written."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self.connection.execute("ROLLBACK")
                self._lately = _lately(self.connection)
                raise
            self.connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise RunError(
                f"Cannot write to {self.path} any more: {error}. Make room, then give the same command again."
            ) from error

    def add(self, results: Sequence[RowResult]) -> list[RowResult]:
        """Write results down, within `transaction`; return those that were not there yet."""
        new, fresh = _not_in(self.connection, {each.key for each in results} - self._lately), list[RowResult]()
        for each in results:
            if each.key in new:
                new.remove(each.key)
                fresh.append(each)
        keys = [each.key for each in fresh]
        self.connection.execute("INSERT INTO lately VALUES (?)", (b"".join(keys),))
        self._lately.update(keys)
        if len(self._lately) >= LATELY:
            self._sort_in()
        self.connection.executemany(
            "INSERT INTO record (text) VALUES (?)", [(text,) for each in fresh for text in each.records]
        )
        errors = [(_kind(result.reason), result) for result in fresh if result.error is not None]
        self.connection.executemany(
            "INSERT OR IGNORE INTO example VALUES (?, ?)", [(kind, result.reason) for kind, result in errors]
        )
        self.connection.executemany(
            "INSERT INTO error VALUES (?, ?, ?)", [(result.key, kind, result.error) for kind, result in errors]
        )
        return fresh

    def records(self, most: int) -> list[str]:
        """Return the oldest records that are not in a shard yet."""
        found = self.connection.execute("SELECT text FROM record ORDER BY number LIMIT ?", (most,))
        return [text for (text,) in found]

    @property
    def waiting(self) -> int:
        """Number of records that are not in a shard yet."""
        # The oldest go first, so the numbers have no gaps. An end is found at once; one SELECT of both reads the table.
        ends = "(SELECT max(number) FROM record) - (SELECT min(number) FROM record)"
        return self._number(f"SELECT coalesce({ends} + 1, 0)")

    @property
    def shards(self) -> int:
        """Number of shards written."""
        return self._number("SELECT count(*) FROM shard")

    @property
    def done(self) -> int:
        """Number of rows that are done, those with errors included."""
        return self._number("SELECT count(*) FROM done") + len(self._lately)

    def shelve(self, name: str, count: int) -> None:
        """Note that the oldest `count` records lie in the shard `name`, which is on the disk."""
        with self.transaction():
            self.connection.execute("INSERT INTO shard VALUES (?, ?)", (name, count))
            self.connection.execute("DELETE FROM record WHERE number < (SELECT min(number) FROM record) + ?", (count,))

    def errors(self) -> Iterator[str]:
        """Yield the records of the errors file."""
        for (text,) in self.connection.execute("SELECT text FROM error"):
            yield text

    def error_counts(self) -> dict[str, int]:
        """Return the number of errors of each kind, most first, under the reason of one of them."""
        query = "SELECT reason, count(*) FROM error JOIN example USING (kind) GROUP BY kind ORDER BY 2 DESC, 1"
        return dict(self.connection.execute(query))

    def forget_errors(self) -> int:
        """Let the rows with errors be done again; return how many."""
        with self.transaction():
            self._sort_in()
            self.connection.execute("DELETE FROM done WHERE key IN (SELECT key FROM error)")
            self.connection.execute("DELETE FROM example")
            return self.connection.execute("DELETE FROM error").rowcount

    def close(self) -> None:
        """Close it; it can be opened again."""
        self.connection.close()

    def _sort_in(self) -> None:
        """Take all keys to `done`, within `transaction`."""
        self.connection.executemany("INSERT INTO done VALUES (?)", [(key,) for key in sorted(self._lately)])
        self.connection.execute("DELETE FROM lately")
        self._lately = set()

    def _number(self, query: str) -> int:
        [(value,)] = self.connection.execute(query)
        return int(value)


def rows_done(path: Path) -> int:
    """Return how many rows the ledger at `path` has, 0 while there is none; for others than the one who writes."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            # In one statement, for keys go from one table to the other.
            lately = f"SELECT coalesce(sum(length(keys)), 0) / {KEY_BYTES} FROM lately"
            [(count,)] = connection.execute(f"SELECT (SELECT count(*) FROM done) + ({lately})")
            return int(count)
    except sqlite3.OperationalError:  # no file, or no tables in it yet
        return 0


def undone(path: Path, keys: Sequence[bytes]) -> set[bytes]:
    """Return which of the keys are not done by the ledger at `path`; for others than the one who writes it."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        # Keys go from one table to the other, so this order misses none.
        lately = _lately(connection)
        return _not_in(connection, set(keys) - lately)


def _kind(reason: str) -> str:
    """Return the kind of an error: reasons of one kind differ in names and numbers only."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", reason)[:KIND_CHARS]


def _lately(connection: sqlite3.Connection) -> set[bytes]:
    found = b"".join(keys for (keys,) in connection.execute("SELECT keys FROM lately"))
    return {found[begin : begin + KEY_BYTES] for begin in range(0, len(found), KEY_BYTES)}


def _not_in(connection: sqlite3.Connection, keys: set[bytes]) -> set[bytes]:
    """Return which of the keys are not in `done`."""
    ordered, there = sorted(keys), set[bytes]()
    for begin in range(0, len(ordered), LATELY):
        some = ordered[begin : begin + LATELY]
        marks = ",".join("?" * len(some))
        there.update(key for (key,) in connection.execute(f"SELECT key FROM done WHERE key IN ({marks})", some))
    return keys - there

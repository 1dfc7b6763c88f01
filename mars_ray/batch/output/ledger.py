"""Ledger of a job: an SQLite database of the finished rows, and of the output records that are in no shard yet.

In:    the settings of the job, the results of rows, and the names of shards.
Out:   the rows that are still unfinished, which stay known even if the driver is killed.
Never: counts a row twice, loses a row, or accepts settings that differ from those of the job.

Only the driver writes to the ledger; other processes may read it with `undone`. If the driver is killed, results that
its workers produce later are not passed to any other driver.
"""

import json
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from mars_ray.batch.rows.columns import ColumnKinds
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
CREATE TABLE IF NOT EXISTS kinds (part TEXT PRIMARY KEY, kinds TEXT) WITHOUT ROWID;
"""
"""Tables of the database.

`record` holds the records that are in no shard yet. `example` holds one reason for each kind of error. A row is done if
its key is in `done` or among the concatenated keys in `lately`. Keys are hashes, so nearly every new key belongs on a
different page of `done`. Keys therefore move from `lately` to `done` in large sorted groups, so each page is written
once per group.
"""
KEY_BYTES = 16
LATELY = 10_000
"""Number of keys to collect in `lately` before they move to `done`."""

KIND_CHARS = 200
"""Number of leading characters of a reason that determine its kind."""

KindsOf = Literal["input", "shards"]
LEDGER = Path(".job") / "ledger.sqlite"
"""Path of the ledger within the folder of a job."""


class Ledger:
    """Ledger of the job in the folder `of`. The file at `path` is created if it is missing."""

    def __init__(self, path: Path, *, of: AnyPath, durable: bool) -> None:
        """Open the ledger, which survives a power failure if `durable`. Raises `OutputError` for an unusable file."""
        self.path = path
        self._job = of
        try:
            self.connection = sqlite3.connect(path, isolation_level=None)
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
            self.connection.executescript(TABLES)
            self._lately = _lately(self.connection)
        except sqlite3.Error as error:
            raise OutputError(f"{path} is not a usable ledger: {error}. Give another output folder.") from error

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Store the settings of a job. Raises `ConfigError` if a setting differs from the one stored by an earlier
        run."""
        stored = self.settings()
        for name in settings | stored if stored else ():
            if stored.get(name) != settings.get(name):
                raise ConfigError(
                    f"the job in {self._job} began with other settings: {name} was "
                    f"{json.dumps(stored.get(name))}, now it is {json.dumps(settings.get(name))}. Use the old value, "
                    "give another output, or use --new to start a new job."
                )
        with self.transaction():
            self.connection.executemany(
                "INSERT OR REPLACE INTO setting VALUES (?, ?)",
                [(name, json.dumps(value)) for name, value in settings.items()],
            )

    def settings(self) -> dict[str, Any]:
        """Return the stored settings, which are empty for a new job."""
        return {name: json.loads(value) for name, value in self.connection.execute("SELECT * FROM setting")}

    def kinds(self, part: KindsOf) -> ColumnKinds:
        """Return the kinds of the values of each input column: with the part `input` those of all inputs so far, with
        `shards` those that the schema of the shards covers."""
        stored = self.connection.execute("SELECT kinds FROM kinds WHERE part = ?", (part,)).fetchone()
        kinds: ColumnKinds = json.loads(stored[0]) if stored else {}
        return kinds

    def set_kinds(self, part: KindsOf, kinds: ColumnKinds) -> None:
        """Store the kinds that `kinds` returns."""
        with self.transaction():
            self.connection.execute("INSERT OR REPLACE INTO kinds VALUES (?, ?)", (part, json.dumps(kinds)))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the `with` block as one transaction. Raises `RunError` if writing fails."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:  # SQLite rolls back by itself if the disk is full
                    self.connection.execute("ROLLBACK")
                self._lately = _lately(self.connection)
                raise
        except sqlite3.Error as error:
            raise RunError(
                f"Cannot write to {self.path}: {error}. Make room, then give the same command again, without --new."
            ) from error

    def add(self, results: Sequence[RowResult]) -> list[RowResult]:
        """Store results, and return those that are new. Call it within `transaction`."""
        new = _not_in(self.connection, {result.key for result in results} - self._lately)
        fresh: list[RowResult] = []
        for result in results:
            if result.key in new:
                new.remove(result.key)
                fresh.append(result)
        keys = [result.key for result in fresh]
        self.connection.execute("INSERT INTO lately VALUES (?)", (b"".join(keys),))
        self._lately.update(keys)
        if len(self._lately) >= LATELY:
            self._sort_in()
        self.connection.executemany(
            "INSERT INTO record (text) VALUES (?)", [(text,) for result in fresh for text in result.records]
        )
        errors = [(_kind(result.reason), result) for result in fresh if result.error is not None]
        self.connection.executemany(
            "INSERT OR IGNORE INTO example VALUES (?, ?)", [(kind, result.reason) for kind, result in errors]
        )
        self.connection.executemany(
            "INSERT INTO error VALUES (?, ?, ?)", [(result.key, kind, result.error) for kind, result in errors]
        )
        return fresh

    def records(self, limit: int) -> list[str]:
        """Return up to `limit` records that are in no shard yet, oldest first."""
        records = self.connection.execute("SELECT text FROM record ORDER BY number LIMIT ?", (limit,))
        return [text for (text,) in records]

    @property
    def waiting(self) -> int:
        """Number of records that are in no shard yet."""
        # Records are removed in order, so their numbers have no gaps. Two SELECTs use the index; a single SELECT would
        # not.
        ends = "(SELECT max(number) FROM record) - (SELECT min(number) FROM record)"
        return self._number(f"SELECT coalesce({ends} + 1, 0)")

    @property
    def shards(self) -> int:
        """Number of shards written."""
        return self._number("SELECT count(*) FROM shard")

    def shard_names(self) -> list[str]:
        """Return the names of the shards written."""
        return [name for (name,) in self.connection.execute("SELECT name FROM shard ORDER BY name")]

    @property
    def done(self) -> int:
        """Number of finished rows, including rows with errors."""
        return self._number("SELECT count(*) FROM done") + len(self._lately)

    def shelve(self, name: str, count: int) -> None:
        """Remove the oldest `count` records, which are now in the shard `name`."""
        with self.transaction():
            self.connection.execute("INSERT INTO shard VALUES (?, ?)", (name, count))
            self.connection.execute("DELETE FROM record WHERE number < (SELECT min(number) FROM record) + ?", (count,))

    def errors(self) -> Iterator[str]:
        """Yield the records for the errors file."""
        for (text,) in self.connection.execute("SELECT text FROM error"):
            yield text

    def error_counts(self) -> dict[str, int]:
        """Return the number of errors of each kind, most frequent first. The key of a kind is the reason of one such
        error."""
        query = "SELECT reason, count(*) FROM error JOIN example USING (kind) GROUP BY kind ORDER BY 2 DESC, 1"
        return dict(self.connection.execute(query))

    def forget_errors(self) -> None:
        """Remove the rows with errors."""
        with self.transaction():
            self._sort_in()
            self.connection.execute("DELETE FROM done WHERE key IN (SELECT key FROM error)")
            self.connection.execute("DELETE FROM example")
            self.connection.execute("DELETE FROM error")

    def close(self) -> None:
        """Close the database."""
        self.connection.close()

    def _sort_in(self) -> None:
        """Move all keys from `lately` to `done`. Call it within `transaction`."""
        self.connection.executemany("INSERT INTO done VALUES (?)", [(key,) for key in sorted(self._lately)])
        self.connection.execute("DELETE FROM lately")
        self._lately = set()

    def _number(self, query: str) -> int:
        [(value,)] = self.connection.execute(query)
        return int(value)


def rows_done(path: Path) -> int:
    """Return the number of finished rows in the ledger at `path`; 0 if there is no ledger. Any process may call it."""
    try:
        with closing(_opened(path)) as connection:
            # Count in one statement, because keys move between the tables.
            lately = f"SELECT coalesce(sum(length(keys)), 0) / {KEY_BYTES} FROM lately"
            [(count,)] = connection.execute(f"SELECT (SELECT count(*) FROM done) + ({lately})")
            return int(count)
    except sqlite3.OperationalError:  # the file is missing or has no tables yet
        return 0


def undone(path: Path, keys: Sequence[bytes]) -> set[bytes]:
    """Return the keys of unfinished rows, according to the ledger at `path`. Any process may call it."""
    with closing(_opened(path)) as connection:
        # Keys move from `lately` to `done`, so reading the tables in this order misses no key.
        lately = _lately(connection)
        return _not_in(connection, set(keys) - lately)


def _opened(path: Path) -> sqlite3.Connection:
    """Open the ledger at `path` for reading only."""
    return sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode=ro", uri=True)


def _kind(reason: str) -> str:
    """Return the kind of an error, which is its reason without quoted names and numbers."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", reason)[:KIND_CHARS]


def _lately(connection: sqlite3.Connection) -> set[bytes]:
    joined = b"".join(keys for (keys,) in connection.execute("SELECT keys FROM lately"))
    return {joined[begin : begin + KEY_BYTES] for begin in range(0, len(joined), KEY_BYTES)}


def _not_in(connection: sqlite3.Connection, keys: set[bytes]) -> set[bytes]:
    """Return the keys that are not in the table `done`."""
    ordered = sorted(keys)
    done_keys: set[bytes] = set()
    for begin in range(0, len(ordered), LATELY):
        part = ordered[begin : begin + LATELY]
        marks = ",".join("?" * len(part))
        done_keys.update(key for (key,) in connection.execute(f"SELECT key FROM done WHERE key IN ({marks})", part))
    return keys - done_keys

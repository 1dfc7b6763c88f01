"""The store of keys: changes while endpoints run, and the keys in force in a gateway.

In:    changes by operators, from the command line and from gateways; the keys that callers present.
Out:   a new key, shown once; the keys in force, which follow the store within about a second.
Never: loses one of two changes made at once, or stops serving because the store becomes invalid or unreachable after
       the start: the last valid keys stay in force.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

from mars_ray.errors import ConfigError, DataError, OutputError
from mars_ray.serve.middleware.api_keys import (
    Entry,
    Form,
    Key,
    KeyTable,
    SimpleKeys,
    digest,
    new_secret,
    parse_entry,
    parse_keys,
    utc_now,
)
from mars_ray.storage.audit_log import AuditLog, AuditWriter
from mars_ray.storage.document import Document, FileDocument, Version

log = logging.getLogger(__name__)
T = TypeVar("T", bound=KeyTable[Any])

CHECK_SECONDS = 1.0
"""Seconds after which a gateway checks the store. A revoked key works for up to this long."""
WAIT_SECONDS = 1.0
"""Seconds that requests wait for a check before they go on with the keys read earlier."""
ATTEMPTS = 50
"""Attempts to make a change while others change the store too."""


def open_key_file(path: Path) -> "KeyStore[SimpleKeys]":
    """Return the store of keys in a YAML file."""
    return KeyStore(SimpleKeys, FileDocument(path), "yaml", AuditLog(None))


class KeyStore(Generic[T]):
    """A table of keys in a document. `by` names who makes a change, as in `AuditEvent`.

    All methods raise `DataError` if the document is invalid or cannot be read, and changes raise `OutputError` if it
    cannot be written. Then nothing was changed.
    """

    def __init__(
        self,
        table: type[T],
        document: Document,
        form: Form,
        audit: AuditLog | AuditWriter,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._table = table
        self._document = document
        self._form = form
        self._audit = audit
        self.now = now
        """Returns the time of day, by which keys expire."""

    @property
    def name(self) -> str:
        """Path or URL of the document."""
        return self._document.name

    def version(self) -> Version | None:
        """Return the newest version; None if there are no keys yet."""
        return self._document.version()

    def read(self) -> T:
        """Return the newest table."""
        version, data = self._document.read()
        if version is None:
            raise DataError(f"{self.name} does not exist. Add a first key to create it, or name another place.")
        return parse_keys(self._table, self.name, data, self._form)

    def add(self, by: str, **fields: Any) -> str:
        """Add a key with these fields of `Key`, and return the key itself, which is not stored.

        Raises `ConfigError` for an invalid field, a name that is taken, or a moment in the past.
        """
        secret = new_secret()
        key = parse_entry(
            self._table.key_class, fields | {"sha256": digest(secret), "created": self.now().date()}, "the new key"
        )
        self._check_future(key)
        self.change(lambda table: table.with_keys([*table.keys, key]))
        self._audit.record(by, "key.added", key.name, details=shown(key))
        return secret

    def update(self, by: str, name: str, **fields: Any) -> Any:
        """Change fields of a key, and return the key. Raises `UnknownNameError`, and `ConfigError` for a bad field."""

        def changed(table: T) -> T:
            old = table.key(name)
            kept = {field: getattr(old, field) for field in old.model_fields_set}
            key = parse_entry(self._table.key_class, kept | fields, f"key {name!r}")
            if key.expires != old.expires:
                self._check_future(key)
            return table.with_key(key)

        key = self.change(changed).key(name)
        self._audit.record(by, "key.changed", name, details=shown(key))
        return key

    def rotate(self, by: str, name: str, grace_s: float) -> str:
        """Give a key a new secret and return it. The old secret stays valid for `grace_s` seconds.

        A secret that an earlier rotation replaced ends now. Raises `UnknownNameError`.
        """
        secret = new_secret()
        ends = self._after(grace_s)

        def rotated(table: T) -> T:
            old = table.key(name)
            new = {"sha256": digest(secret), "old_sha256": old.sha256, "old_expires": ends}
            return table.with_key(old.model_copy(update=new))

        self.change(rotated)
        self._audit.record(by, "key.rotated", name, details={"old_expires": ends.isoformat()})
        return secret

    def remove(self, by: str, name: str) -> None:
        """Remove a key; gateways refuse it from their next check. Raises `UnknownNameError`."""
        self.change(lambda table: table.without_key(name))
        self._audit.record(by, "key.removed", name)

    def change(self, change: Callable[[T], T]) -> T:
        """Change the table, again if others changed it meanwhile, and return it."""
        for _ in range(ATTEMPTS):
            version, data = self._document.read()
            table = self._table(self.name) if version is None else parse_keys(self._table, self.name, data, self._form)
            changed = change(table)
            if self._document.swap(version, changed.to_bytes(self._form)):
                return changed
        raise OutputError(f"{self.name} was changed by others {ATTEMPTS} times meanwhile. Try again.")

    def _check_future(self, key: Key) -> None:
        if key.expires is not None and key.expires <= self.now():
            raise ConfigError(f"expires is {key.expires.isoformat()}, which is past. Give a later moment.")

    def _after(self, seconds: float) -> datetime:
        try:
            return self.now() + timedelta(seconds=seconds)
        except OverflowError:
            raise ConfigError(f"the grace time is {seconds:g} s, too long for a date. Give a shorter one.") from None


def shown(entry: Entry) -> dict[str, Any]:
    """Return the fields of an entry for the audit log: no hashes."""
    hidden = {"name", "created", "sha256", "old_sha256"}
    return entry.model_dump(mode="json", exclude=hidden, exclude_defaults=True)


class LiveKeys(Generic[T]):
    """The keys in force in a gateway. Raises `DataError` if the store cannot be used at the start.

    `classes` are the classes of service of the endpoint; None allows all names. At the start an entry with another
    class is a `ConfigError`, and later only this entry is refused. Use it on one event loop.
    """

    def __init__(
        self,
        store: KeyStore[T],
        clock: Callable[[], float] = time.monotonic,
        *,
        classes: Collection[str] | None = None,
    ) -> None:
        self.store = store
        self.classes = classes
        self._clock = clock
        self._checked_at = clock()
        self._changes = 0
        """Number of changes made through this process; a check that began before the last one has not seen it."""
        self._loaded = store.version()
        self.table = store.read()
        """The table of the last check."""
        self._check_classes()
        self._complaint: str | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keys")
        self._check: asyncio.Task[None] | None = None
        self._hangs = False

    def expire(self) -> None:
        """Let the next caller wait for a check, because the store has changed."""
        self._checked_at = -math.inf
        self._changes += 1

    async def refresh(self) -> None:
        """Check the store if the last check is old. At most one check runs, however many callers wait.

        It has a thread of its own, because slow calls of a caller may fill the threads that others share.
        """
        age_s = self._clock() - self._checked_at
        if self._check is None and not 0 <= age_s < CHECK_SECONDS / 2:
            self._check = asyncio.create_task(self._check_once())
        if self._check is not None and not 0 <= age_s < CHECK_SECONDS and not self._hangs:
            done, _ = await asyncio.wait([self._check], timeout=WAIT_SECONDS)
            if not done and not self._hangs:
                self._hangs = True
                log.error("%s does not answer. The keys read earlier stay in force.", self.store.name)
            if done and self._checked_at == -math.inf:
                await self.refresh()

    async def _check_once(self) -> None:
        changes = self._changes
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.check)
        except Exception:
            log.exception("the keys cannot be checked; the keys read earlier stay in force")
        finally:
            if changes == self._changes:
                self._checked_at = self._clock()
            self._check = None
            self._hangs = False

    def check(self) -> None:
        """Load the keys if they have changed. While they are invalid or missing, the last valid keys stay in force."""
        # If reading fails, retry at every check, because a read can fail although the store is valid.
        try:
            # Take the version before reading: if the keys change in between, the next check reads again.
            version = self.store.version()
            if version is None or version != self._loaded:
                self.table = self.store.read()
                self._loaded = version
                self._check_classes()
                log.info("read %d keys from %s", len(self.table.keys), self.store.name)
            self._complaint = None
        except ConfigError as error:
            log.error("%s Its requests are refused.", error)
        except DataError as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                log.error("%s The keys read earlier stay in force.", error)

    def _check_classes(self) -> None:
        if self.classes is not None:
            self.table.check_classes(self.classes)

"""API keys: a YAML file with the hash, the name and the role of each key, but never a key itself.

In:    the file, which may change at any time; the key that a caller presents.
Out:   the matching entry, or None; a new key, shown once.
Never: stops serving because the file becomes invalid after the start, or reveals by its timing how close a guess was.

Hashes are plain SHA-256. Slow, salted hashes protect secrets that can be guessed, but these keys are 256 random bits.
"""

import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mars_ray.errors import ConfigError, OutputError

log = logging.getLogger(__name__)

Role = Literal["use", "operate"]

CHECK_SECONDS = 1.0
"""Seconds between two checks of the file. A revoked key works for up to this long."""

_SHOWN_CHARS = 8


class Key(BaseModel):
    """One entry of the key file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the key in logs and metrics."""
    role: Role
    """`use` may call the model; `operate` may also use all other routes of the endpoint."""
    service_class: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Class of service for requests with this key; None means the first class of the endpoint."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    created: date


def role_allows(role: Role, needed: Role) -> bool:
    """Return whether a key with `role` may use paths that need the role `needed`."""
    return role in ("operate", needed)


class KeyFile:
    """The current keys of a file. Raises `ConfigError` if the file cannot be used at the start.

    `classes` are the classes of service that keys may name; None allows all names.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, *, classes: Collection[str] | None = None
    ) -> None:
        self._path = path
        self._classes = classes
        self._clock = clock
        self._checked_at = clock()
        self._loaded = _stamp(path)
        self._keys: Sequence[Key] = read_keys(path, classes)
        self._complaint: str | None = None

    def find(self, presented: str) -> Key | None:
        """Return the key that a caller presented. Compares all entries so that timing does not reveal the match."""
        self._reload()
        sha256 = _sha256(presented)
        match = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, sha256):
                match = key
        return match

    def _reload(self) -> None:
        """Load the file if it has changed. While it is invalid or missing, the last valid keys stay in force."""
        now = self._clock()
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        # Take the stamp before reading: if the file changes in between, the next stamp differs and the file is read
        # again.
        stamp = _stamp(self._path)
        if stamp is not None and stamp == self._loaded:
            self._complaint = None
            return
        # If reading fails, retry at every check, because a read can fail although the file is valid.
        try:
            self._keys = read_keys(self._path, self._classes)
        except ConfigError as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                log.error("%s The keys read earlier stay in force.", error)
        else:
            self._loaded = stamp
            self._complaint = None
            log.info("read %d keys from %s", len(self._keys), self._path)


def add_key(
    path: Path, name: str, role: Role, service_class: str | None = None, today: Callable[[], date] = date.today
) -> str:
    """Add a key to the file, creating the file if needed, and return the key itself, which is not stored.

    Raises `ConfigError` for an invalid name or role, or a name that is taken. Comments in the file are lost.
    """
    presented = "mars-" + secrets.token_urlsafe(32)
    with _locked(path) as file:
        keys = read_keys(file) if file.exists() else []
        entry = {"name": name, "role": role, "sha256": _sha256(presented), "created": today()}
        entry |= {"service_class": service_class} if service_class else {}
        _write(file, _checked(file, [*keys, _key(file, len(keys) + 1, entry)]))
    return presented


def remove_key(path: Path, name: str) -> None:
    """Remove a key from the file; it stops working at the next check. Raises `ConfigError` for an unknown name."""
    with _locked(path) as file:
        keys = read_keys(file)
        remaining = [key for key in keys if key.name != name]
        if len(remaining) == len(keys):
            names = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"{file} has no key named {name!r}. It has: {names}.")
        _write(file, remaining)


def _sha256(presented: str) -> str:
    return hashlib.sha256(presented.encode(errors="replace")).hexdigest()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return the file's modification time, inode and size, which reveal changes; None if they cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def read_keys(path: Path, classes: Collection[str] | None = None) -> Sequence[Key]:
    """Return the keys in the file. Raises a `ConfigError` that names the file, the entry and the value."""
    try:
        # The base loader returns every value as a string and runs no constructors, so only these errors can occur.
        entries = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Add a first key to create it, or name another file.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{path} holds no list of keys. A file without keys must contain [].")
    keys = _checked(path, [_key(path, number, entry) for number, entry in enumerate(entries, 1)])
    for number, key in enumerate(keys, 1):
        if classes is not None and key.service_class is not None and key.service_class not in classes:
            raise ConfigError(
                f"{path}, entry {number}: service_class is {key.service_class!r}, must be one of {', '.join(classes)}."
            )
    return keys


def _key(path: Path, number: int, entry: object) -> Key:
    try:
        return Key.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the entry"
        if first["type"] in ("missing", "extra_forbidden"):
            problem = f"{field} is {'missing' if first['type'] == 'missing' else 'not a field of a key'}"
        else:
            problem = f"{field} is {_shown(first['input'])}: {first['msg']}"
        raise ConfigError(f"{path}, entry {number}: {problem}. Correct or remove the entry.") from None


def _shown(value: object) -> str:
    """Return a value shortened for an error message, because it may be a key written in place of its hash."""
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    return repr(value) if len(value) <= 2 * _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]!r}… ({len(value)} characters)"


def _checked(path: Path, keys: Sequence[Key]) -> Sequence[Key]:
    """Return `keys`. Raises `ConfigError` for duplicate names or keys: removing one entry would not revoke the key."""
    names: set[str] = set()
    hashes: set[str] = set()
    for number, key in enumerate(keys, 1):
        if key.name in names:
            raise ConfigError(f"{path}, entry {number}: the name {key.name!r} is taken. Choose another.")
        if key.sha256 in hashes:
            raise ConfigError(
                f"{path}, entry {number}: {key.name!r} has the hash of an earlier entry. Remove one of them."
            )
        names.add(key.name)
        hashes.add(key.sha256)
    return keys


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Lock the file within the block. Yields its resolved path, so that writing does not replace a symbolic link."""
    file = path.resolve()
    lock = file.with_name(f".{file.name}.lock")  # a separate file, because every change replaces the key file
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise OutputError(f"Cannot write to {file.parent}: {error.strerror}. Choose another folder.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(descriptor)


def _write(file: Path, keys: Sequence[Key]) -> None:
    """Replace the file atomically and durably. The temporary file is private from the start."""
    content = yaml.safe_dump([key.model_dump(exclude_none=True) for key in keys], sort_keys=False)
    try:
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename must survive a power cut; otherwise a revoked key could come back
        finally:
            os.close(folder)
    except OSError as error:
        raise OutputError(f"Cannot write {file}: {error.strerror}. Nothing was changed.") from error

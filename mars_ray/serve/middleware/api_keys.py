"""API keys: what is stored about them, and how a table of them is changed.

In:    a table as YAML or JSON, with the hash of each key but never a key itself; changes by name.
Out:   the table after a change; the entry of the key that a caller presents.
Never: holds two keys with one name or one hash, because removing one entry would not revoke the key.

Hashes are plain SHA-256. Slow, salted hashes protect secrets that can be guessed, but these keys are 256 random bits.
A key is looked up by its hash, in a hash table with a random seed. Callers cannot choose hashes, so the time of a
lookup reveals nothing about a stored key.
"""

import hashlib
import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from itertools import chain
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import yaml
from pydantic import AwareDatetime, BaseModel, Field, ValidationError, model_validator

from mars_ray.errors import ConfigError, DataError, UnknownNameError

E = TypeVar("E", bound=BaseModel)
K = TypeVar("K", bound="Key")
T = TypeVar("T", bound="KeyTable[Any]")
Role = Literal["use", "operate"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]

Form = Literal["json", "yaml"]
"""YAML in files, which people read and edit; JSON elsewhere, because large YAML takes seconds to read."""

KEYS_MAX = 10_000
_SHOWN_CHARS = 8


class Entry(BaseModel, extra="forbid", frozen=True):
    """Type of the named entries of a table."""

    name: Name
    service_class: Name | None = None
    """Class of service; None means the first class of the endpoint."""


class Key(Entry):
    """One API key. Its name is in logs and metrics."""

    role: Role
    """`use` may call the model; `operate` may also use all other routes of the endpoint."""
    sha256: Digest = Field(repr=False)
    created: date
    expires: AwareDatetime | None = None
    """Moment from which the key is refused; None means that it does not expire."""
    old_sha256: Digest | None = Field(None, repr=False)
    """Hash of the secret before the last rotation."""
    old_expires: AwareDatetime | None = None
    """Moment from which the secret before the last rotation is refused."""

    @model_validator(mode="after")
    def _old_secret_is_whole(self) -> Self:
        if (self.old_sha256 is None) != (self.old_expires is None):
            raise ValueError("give old_sha256 and old_expires, or neither")
        return self

    @property
    def owner(self) -> str:
        """Name of the owner of what the key's requests store."""
        return self.name

    @property
    def hashes(self) -> Iterator[str]:
        """Hashes of the secret and of the one before it."""
        yield self.sha256
        if self.old_sha256 is not None:
            yield self.old_sha256

    def expired(self, sha256: str, now: datetime) -> bool:
        """Return whether the secret with this hash is no longer valid."""
        ends = [self.expires, self.old_expires if sha256 == self.old_sha256 else None]
        return any(end is not None and end <= now for end in ends)


def role_allows(role: Role, needed: Role) -> bool:
    """Return whether a key with `role` may use paths that need the role `needed`."""
    return role in ("operate", needed)


def new_secret() -> str:
    """Return a new key, as its caller presents it."""
    return "mars-" + secrets.token_urlsafe(32)


def digest(presented: str) -> str:
    """Return the SHA-256 of a key that a caller presents."""
    return hashlib.sha256(presented.encode(errors="replace")).hexdigest()


class KeyTable(Generic[K]):
    """Keys at one moment. Raises `ConfigError` for keys that cannot be together."""

    key_class: type[K]

    def __init__(self, source: str, keys: Sequence[K] = ()) -> None:
        self.source = source
        self.keys = tuple(keys)
        self._check("key", self.keys)
        self._key_of_hash = {sha256: key for key in self.keys for sha256 in key.hashes}
        if len(self._key_of_hash) < sum(len(list(key.hashes)) for key in self.keys):
            raise ConfigError(self._shared_hash())

    def find(self, sha256: str) -> K | None:
        """Return the key with this hash, which may have expired."""
        return self._key_of_hash.get(sha256)

    def key(self, name: str) -> K:
        """Return the key with this name. Raises `UnknownNameError`."""
        return next((key for key in self.keys if key.name == name), None) or self._unknown("key", name, self.keys)

    def with_keys(self, keys: Sequence[K]) -> Self:
        """Return the table with other keys."""
        return type(self)(self.source, keys)

    def with_key(self, key: K) -> Self:
        """Return the table with a key in place of the key with its name."""
        return self.with_keys([key if old.name == key.name else old for old in self.keys])

    def without_key(self, name: str) -> Self:
        """Return the table without a key. Raises `UnknownNameError`."""
        removed = self.key(name)
        return self.with_keys([key for key in self.keys if key is not removed])

    def entries(self) -> Mapping[str, Sequence[Entry]]:
        """Return all entries by group, as in a document."""
        return {"keys": self.keys}

    @classmethod
    def of_groups(cls, source: str, groups: Mapping[str, Sequence[object]]) -> Self:
        """Return the table of the groups of a document. Raises a `ConfigError` that names the entry and the value."""
        return cls(source, cls.parsed(cls.key_class, "key", source, groups["keys"]))

    @staticmethod
    def parsed(kind: type[E], name: str, source: str, entries: Sequence[object]) -> list[E]:
        """Return the entries of a group."""
        return [parse_entry(kind, entry, f"{source}, {name} {number}") for number, entry in enumerate(entries, 1)]

    def check_classes(self, classes: Collection[str]) -> None:
        """Raise `ConfigError` for an entry with a class of service that is not among `classes`."""
        for entry in chain.from_iterable(self.entries().values()):
            if entry.service_class is not None and entry.service_class not in classes:
                raise ConfigError(
                    f"{self.source}, {entry.name}: service_class is {entry.service_class!r}, must be one of "
                    f"{', '.join(classes)}."
                )

    def to_bytes(self, form: Form) -> bytes:
        """Return the table as a document that `parse_keys` reads."""
        fields = {
            group: [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]
            for group, entries in self.entries().items()
        }
        text = json.dumps(fields, indent=1) if form == "json" else yaml.safe_dump(fields, sort_keys=False)
        return text.encode()

    def _unknown(self, kind: str, name: str, entries: Sequence[Entry]) -> Any:
        names = ", ".join(entry.name for entry in entries[:20]) or "none"
        more = f" and {len(entries) - 20} more" if len(entries) > 20 else ""
        raise UnknownNameError(f"{self.source} has no {kind} named {name[:80]!r}. It has: {names}{more}.")

    def _check(self, kind: str, entries: Sequence[Entry]) -> None:
        """Raise `ConfigError` for too many entries, or for two with one name."""
        if len(entries) > KEYS_MAX:
            raise ConfigError(f"{self.source} has more than {KEYS_MAX} {kind}s. Remove some.")
        names = [entry.name for entry in entries]
        if len(set(names)) < len(names):
            name = next(name for number, name in enumerate(names) if name in names[:number])
            number = names.index(name, names.index(name) + 1) + 1
            raise ConfigError(f"{self.source}, {kind} {number}: the name {name!r} is taken. Choose another.")

    def _shared_hash(self) -> str:
        seen: set[str] = set()
        for number, key in enumerate(self.keys, 1):
            if not seen.isdisjoint(key.hashes):
                return f"{self.source}, key {number}: {key.name!r} has the hash of an earlier key. Remove one of them."
            seen.update(key.hashes)
        return f"{self.source}: a key has the same hash twice. Remove old_sha256."


class SimpleKeys(KeyTable[Key]):
    """Keys with a role and a class of service."""

    key_class = Key


def parse_keys(table: type[T], source: str, data: bytes, form: Form) -> T:
    """Return the table in a document. Raises a `DataError` that names the document, the entry and the value."""
    try:
        return _parse(table, source, data, form)
    except ConfigError as error:
        raise DataError(str(error)) from None


def _parse(table: type[T], source: str, data: bytes, form: Form) -> T:
    try:
        text = data.decode()
        # The base loader returns every value as a string and runs no constructors, so only these errors can occur.
        fields = json.loads(text) if form == "json" else yaml.load(text, Loader=yaml.BaseLoader)
    except (UnicodeDecodeError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read: {' '.join(str(error).split())}.") from error
    groups = list(table(source).entries())
    if not isinstance(fields, dict) or "keys" not in fields or not fields.keys() <= set(groups):
        also = "".join(f" and perhaps `{group}`" for group in groups if group != "keys")
        raise ConfigError(f"{source} must be a mapping with `keys`{also}. Without keys: `keys: []`.")
    if not all(isinstance(group, list) for group in fields.values()):
        raise ConfigError(f"{source}: {' and '.join(f'`{group}`' for group in groups)} must be lists.")
    return table.of_groups(source, fields)


def parse_entry(kind: type[E], entry: object, location: str) -> E:
    """Return an entry as an object. Raises a `ConfigError` that names the location, the field and the value."""
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the entry"
        if first["type"] in ("missing", "extra_forbidden"):
            problem = f"{field} is {'missing' if first['type'] == 'missing' else 'not a field here'}"
        else:
            problem = f"{field} is {_shown(first['input'])}: {first['msg']}"
        raise ConfigError(f"{location}: {problem}. Correct or remove the entry.") from None


def _shown(value: object) -> str:
    """Return a value shortened for an error message, because it may be a key written in place of its hash."""
    if not isinstance(value, str):
        return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"
    return repr(value) if len(value) <= 2 * _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]!r}… ({len(value)} characters)"


def utc_now() -> datetime:
    """Return the time of day by this machine's clock."""
    return datetime.now(UTC)

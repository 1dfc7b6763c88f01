"""Keys that belong to accounts, the limits of both, and their store in a file or in the storage of an endpoint.

In:    changes by operators, from the command line and from gateways.
Out:   a table that gateways follow within about a second, and events of the audit log.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from mars_ray.chat.request_body import one_unknown_field
from mars_ray.errors import ConfigError
from mars_ray.serve.middleware.api_keys import Entry, Key, KeyTable, parse_entry
from mars_ray.serve.middleware.key_store import KeyStore, shown
from mars_ray.storage.audit_log import AuditLog, AuditWriter
from mars_ray.storage.document import FileDocument, VersionedDocument
from mars_ray.storage.location import locate

Count = Annotated[int, Field(ge=1, le=10**15)]
Money = Annotated[float, Field(gt=0, le=1e12)]
AccountName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._@|:+=-]{1,128}$")]
"""Name of an account. It allows more characters than names of keys, because subjects of tokens are accounts too."""
KeyPlace = Path | Literal["storage"]
"""File of keys, or `storage` for keys below `accounts` in the storage of the endpoint."""


class UsageLimits(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Limits of one key or of all keys of an account together. None means no limit."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt and answered tokens per minute."""
    tokens_per_day: Count | None = None
    """Prompt and answered tokens per day in UTC."""
    tokens_per_month: Count | None = None
    """Prompt and answered tokens per calendar month in UTC."""
    money_per_day: Money | None = None
    """Price of the tokens per day in UTC, in the currency of the prices."""
    money_per_month: Money | None = None
    """Price of the tokens per calendar month in UTC, in the currency of the prices."""

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: Any) -> Any:
        return one_unknown_field(cls, value)


class Account(Entry):
    """Limits of all keys and tokens of one account together. Accounts without limits need no entry."""

    name: AccountName
    limits: UsageLimits = UsageLimits()


class AccountKey(Key):
    """An API key of an account. Its class of service defaults to that of the account."""

    limits: UsageLimits = UsageLimits()
    account: AccountName | None = None
    """Account that the key belongs to; None means an account of its own, with the name of the key."""

    @property
    def owner(self) -> str:
        """Name of the account that the key belongs to."""
        return self.account or self.name


class AccountTable(KeyTable[AccountKey]):
    """Keys and accounts at one moment. Raises `ConfigError` for contradictory entries."""

    key_class = AccountKey

    def __init__(self, source: str, keys: Sequence[AccountKey] = (), accounts: Sequence[Account] = ()) -> None:
        super().__init__(source, keys)
        self.accounts = tuple(accounts)
        self._check("account", self.accounts)

    @cached_property
    def account_of_name(self) -> Mapping[str, Account]:
        """The accounts with an entry, by name."""
        return {account.name: account for account in self.accounts}

    def account(self, name: str) -> Account:
        """Return the entry of an account. Raises `UnknownNameError` if it has none."""
        account: Account = self.account_of_name.get(name) or self._unknown("account", name, self.accounts)
        return account

    def with_keys(self, keys: Sequence[AccountKey]) -> Self:
        """Return the table with other keys."""
        return type(self)(self.source, keys, self.accounts)

    def with_account(self, account: Account) -> Self:
        """Return the table with an account added, or in place of the entry with its name."""
        accounts = dict(self.account_of_name) | {account.name: account}
        return type(self)(self.source, self.keys, list(accounts.values()))

    def without_account(self, name: str) -> Self:
        """Return the table without the entry of an account. Raises `UnknownNameError` if it has none."""
        removed = self.account(name)
        return type(self)(self.source, self.keys, [account for account in self.accounts if account is not removed])

    def entries(self) -> Mapping[str, Sequence[Entry]]:
        """Return all entries by group, as in a document."""
        return {"keys": self.keys, "accounts": self.accounts}

    @classmethod
    def of_groups(cls, source: str, groups: Mapping[str, Sequence[Any]]) -> Self:
        """Return the table of the groups of a document. Raises a `ConfigError` that names the entry and the value."""
        keys = cls.parsed(AccountKey, "key", source, groups["keys"])
        return cls(source, keys, cls.parsed(Account, "account", source, groups.get("accounts", [])))


class AccountStore(KeyStore[AccountTable]):
    """Keys and accounts in a document."""

    def set_account(self, by: str, **fields: Any) -> Account:
        """Add an account with these fields of `Account`, or replace its entry. Raises `ConfigError` for a bad field."""
        account = parse_entry(Account, fields, "the account")
        self.change(lambda table: table.with_account(account))
        self._audit.record(by, "account.set", account.name, details=shown(account))
        return account

    def remove_account(self, by: str, name: str) -> None:
        """Remove the entry of an account, whose keys stay valid. Raises `UnknownNameError` if it has none."""
        self.change(lambda table: table.without_account(name))
        self._audit.record(by, "account.removed", name)


def audit_folder(storage: str | None) -> str | None:
    """Return the folder or URL of the audit log in the storage of an endpoint; None without a storage."""
    return None if storage is None else str(locate(storage) / "accounts" / "audit")


def open_audit_log(storage: str | None) -> AuditLog:
    """Return the log of operators' acts in a storage; None means that they go to the process's log only."""
    folder = audit_folder(storage)
    return AuditLog(None if folder is None else locate(folder))


def open_account_store(keys: KeyPlace, storage: str | None, audit: AuditWriter | None = None) -> AccountStore:
    """Return the store of keys in a file or in a storage. Raises `ConfigError` for a URL that cannot be used.

    Without `audit`, each change waits until it is in the audit log of the storage.
    """
    recorder = audit or open_audit_log(storage)
    if keys != "storage":
        return AccountStore(AccountTable, FileDocument(Path(keys)), "yaml", recorder)
    if storage is None:
        raise ConfigError("keys are in the storage, but no storage is set. Set `storage`, or name a file of keys.")
    document = VersionedDocument(locate(storage) / "accounts" / "keys")
    return AccountStore(AccountTable, document, "json", recorder)

"""Keys that belong to accounts, and the limits of both.

In:    a table as YAML or JSON; changes by name.
Out:   the table after a change.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field

from mars_ray.platform.accounts.usage_limits import UsageLimits
from mars_ray.serve.middleware.api_keys import Entry, Key, KeyTable

AccountName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._@|:+=-]{1,128}$")]
"""Name of an account. It allows more characters than names of keys, because subjects of tokens are accounts too."""


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

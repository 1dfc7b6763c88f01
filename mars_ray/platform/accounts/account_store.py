"""The store of keys and accounts, in a file or in the storage of an endpoint.

In:    changes by operators, from the command line and from gateways.
Out:   a table that gateways follow within about a second, and events of the audit log.
"""

from pathlib import Path
from typing import Any, Literal

from mars_ray.errors import ConfigError
from mars_ray.platform.accounts.account_table import Account, AccountTable
from mars_ray.serve.middleware.api_keys import parse_entry
from mars_ray.serve.middleware.key_store import KeyStore, shown
from mars_ray.storage.audit_log import AuditLog
from mars_ray.storage.document import FileDocument, VersionedDocument
from mars_ray.storage.location import locate

KeyPlace = Path | Literal["storage"]
"""File of keys, or `storage` for keys below `accounts` in the storage of the endpoint."""


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


def open_account_store(keys: KeyPlace, storage: str | None, audit: AuditLog | None = None) -> AccountStore:
    """Return the store of keys in a file or in a storage. Raises `ConfigError` for a URL that cannot be used."""
    audit = audit or open_audit_log(storage)
    if keys != "storage":
        return AccountStore(AccountTable, FileDocument(Path(keys)), "yaml", audit)
    if storage is None:
        raise ConfigError("keys are in the storage, but no storage is set. Set `storage`, or name a file of keys.")
    document = VersionedDocument(locate(storage) / "accounts" / "keys")
    return AccountStore(AccountTable, document, "json", audit)

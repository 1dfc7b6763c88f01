"""The commands `mars-ray keys ...` and `mars-ray accounts ...`, which manage who may use endpoints, and within which
limits.

A key is shown only once; the store has its hash.
"""

import getpass
import socket
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from mars_ray.cli.control import seconds_of
from mars_ray.cli.shared import print_line
from mars_ray.errors import ConfigError
from mars_ray.platform.accounts.account_store import AccountStore, UsageLimits, open_account_store
from mars_ray.serve.middleware.api_keys import Role, utc_now
from mars_ray.serve.middleware.key_store import CHECK_SECONDS

keys_app = typer.Typer(help="Add, change, list and remove API keys of endpoints.", no_args_is_help=True)
accounts_app = typer.Typer(help="Set limits that all keys of an account share.", no_args_is_help=True)

File = Annotated[
    Path | None, typer.Option("--file", help="YAML file of keys, to which `keys` in a serve config refers.")
]
Storage = Annotated[
    str | None,
    typer.Option(help="Folder or URL that is `storage` in a serve config with `keys: storage`, instead of --file."),
]
Name = Annotated[str, typer.Option("--name", help="Name in logs and metrics: letters, digits, '.', '_' and '-'.")]
ServiceClass = Annotated[
    str | None,
    typer.Option("--class", help="Class of service. Default: the class of the account, else the first class."),
]
AccountOption = Annotated[
    str | None, typer.Option("--account", help="Account of the key. Default: one of its own, with its name.")
]
Limit = Annotated[
    list[str] | None,
    typer.Option(help=f"NAME=VALUE, as often as needed. Names: {', '.join(UsageLimits.model_fields)}."),
]
Expires = Annotated[
    str | None,
    typer.Option(help="Time until the key expires, such as 90d, or a date and time with an offset. Default: never."),
]


@keys_app.command()
def add(
    name: Name,
    file: File = None,
    storage: Storage = None,
    role: Annotated[
        Role, typer.Option(help="'use' calls the model; 'operate' may also read metrics, set thresholds and keys.")
    ] = "use",
    service_class: ServiceClass = None,
    account: AccountOption = None,
    limit: Limit = None,
    expires: Expires = None,
) -> None:
    """Add a key and print it. The key is shown only once; the store has its hash."""
    store = _store(file, storage)
    key = store.add(_operator(), name=name, role=role, **_fields(service_class, account, limit, expires))
    print(key)
    print_line(
        f"keep the key above: it is not stored. Endpoints that use {store.name} accept it within {CHECK_SECONDS:g} s."
    )


@keys_app.command("list")
def list_keys(file: File = None, storage: Storage = None) -> None:
    """List the keys: name, role, creation day, class, account, end and limits."""
    store = _store(file, storage)
    keys = store.read().keys
    width = max((len(key.name) for key in keys), default=0)
    now = store.now()
    for key in keys:
        ended = "expired" if key.expired(key.sha256, now) else "expires"
        old = key.old_expires is not None and key.old_expires > now
        notes = [
            key.service_class or "",
            f"account={key.account}" if key.account else "",
            f"{ended}={_shown(key.expires)}" if key.expires else "",
            f"old key until {_shown(key.old_expires)}" if old and key.old_expires else "",
            *_limits_shown(key.limits),
        ]
        print("  ".join(filter(None, (f"{key.name:<{width}}", f"{key.role:<7}", str(key.created), *notes))))
    if not keys:
        print_line(f"{store.name} has no keys: nobody may call an endpoint that reads it.")


@keys_app.command("set")
def set_key(
    name: Name,
    file: File = None,
    storage: Storage = None,
    role: Annotated[Role | None, typer.Option(help="New role.")] = None,
    service_class: ServiceClass = None,
    account: AccountOption = None,
    limit: Annotated[list[str] | None, typer.Option(help="NAME=VALUE. The limits given replace all limits.")] = None,
    expires: Expires = None,
) -> None:
    """Change a key, which stays the same for its caller. Options that are not given change nothing."""
    fields = _fields(service_class, account, limit, expires) | ({"role": role} if role else {})
    if not fields:
        raise ConfigError("nothing to change. Give an option, such as --class or --limit.")
    _store(file, storage).update(_operator(), name, **fields)
    print_line(f"changed {name!r}. Endpoints follow within {CHECK_SECONDS:g} s.")


@keys_app.command()
def rotate(
    name: Name,
    file: File = None,
    storage: Storage = None,
    grace: Annotated[str, typer.Option(help="Time for which the old key stays valid, such as 1h; 0s ends it.")] = "1d",
) -> None:
    """Give a key a new secret and print it. The old key stays valid for a grace time."""
    seconds = 0.0 if grace == "0s" else seconds_of(grace, "--grace")
    print(_store(file, storage).rotate(_operator(), name, seconds))
    print_line(f"keep the key above: it is not stored. The old key of {name!r} is valid for {grace}.")


@keys_app.command()
def remove(name: Name, file: File = None, storage: Storage = None) -> None:
    """Remove a key; every endpoint that uses the store refuses it."""
    _store(file, storage).remove(_operator(), name)
    print_line(
        f"removed {name!r}. Endpoints refuse it within {CHECK_SECONDS:g} s; requests that are running may finish."
    )


@accounts_app.command("set")
def set_account(
    name: Name,
    file: File = None,
    storage: Storage = None,
    service_class: Annotated[
        str | None, typer.Option("--class", help="Class of service of keys that name none. Default: the first class.")
    ] = None,
    limit: Limit = None,
) -> None:
    """Set the class and the limits of an account, in place of the present ones."""
    _store(file, storage).set_account(_operator(), name=name, **_fields(service_class, None, limit, None))
    print_line(f"set account {name!r}. Endpoints follow within {CHECK_SECONDS:g} s.")


@accounts_app.command("list")
def list_accounts(file: File = None, storage: Storage = None) -> None:
    """List the accounts that have a class or limits."""
    for account in _store(file, storage).read().accounts:
        print("  ".join(filter(None, (account.name, account.service_class, *_limits_shown(account.limits)))))


@accounts_app.command("remove")
def remove_account(name: Name, file: File = None, storage: Storage = None) -> None:
    """Remove the class and the limits of an account, whose keys stay valid."""
    _store(file, storage).remove_account(_operator(), name)
    print_line(f"removed the limits of account {name!r}.")


def _store(file: Path | None, storage: str | None) -> AccountStore:
    if (file is None) == (storage is None):
        raise ConfigError("give --file for a file of keys, or --storage for the storage of an endpoint.")
    return open_account_store(file or "storage", storage)


def _fields(
    service_class: str | None, account: str | None, limit: Sequence[str] | None, expires: str | None
) -> dict[str, Any]:
    fields: dict[str, Any] = {"service_class": service_class, "account": account}
    if limit:
        pairs = [text.partition("=") for text in limit]
        fields["limits"] = {name: value for name, _, value in pairs}
    if expires is not None:
        fields["expires"] = _moment(expires)
    return {name: value for name, value in fields.items() if value is not None}


def _moment(text: str) -> datetime:
    try:
        if text[-1:] in tuple("smhd"):
            return utc_now() + timedelta(seconds=seconds_of(text, "--expires"))
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        moment = None
    if moment is None or moment.tzinfo is None:
        example = "2027-01-31T00:00:00Z"
        raise ConfigError(f"--expires is {text!r}; give a time such as 90d, or a moment with an offset: {example}.")
    return moment


def _limits_shown(limits: UsageLimits) -> list[str]:
    return [f"{name}={value}" for name, value in limits if value is not None]


def _shown(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


def _operator() -> str:
    """Return the name of the person at the command line, for the audit log."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # an account without a name, as in some containers
        user = "unknown"
    return f"command:{user}@{socket.gethostname()}"

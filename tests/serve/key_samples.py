"""Files of API keys for tests, and the keys in force of such a file."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mars_ray.installed import HAS_PLATFORM
from mars_ray.serve.middleware.api_keys import Key, digest
from mars_ray.serve.middleware.key_store import LiveKeys, open_key_file

BY = "command:tests@here"


def key_file(path: Path) -> Any:
    """The store of keys in a file."""
    if not HAS_PLATFORM:
        return open_key_file(path)
    from mars_ray.platform.accounts.account_store import open_account_store

    return open_account_store(path, None)


def add_key(path: Path, name: str, role: str, service_class: str | None = None, **fields: Any) -> str:
    """Add a key to a file, which is created if needed, and return the key itself."""
    more = {} if service_class is None else {"service_class": service_class}
    return key_file(path).add(BY, name=name, role=role, **more, **fields)


def live_keys(path: Path, clock: Callable[[], float] = time.monotonic) -> LiveKeys:
    """The keys in force of a file, in a gateway."""
    return LiveKeys(key_file(path), clock)


def found(keys: LiveKeys, presented: str) -> Key | None:
    """Check the file as a gateway does, and return the key that is presented."""
    keys.check()
    return keys.table.find(digest(presented))

"""Callers and how they are recognised by an API key.

In:    the text of a Bearer header.
Out:   the caller: name, role and class.
Never: tells a caller which other keys exist.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from mars_ray.openai_api.api_error import ApiError
from mars_ray.serve.middleware.api_keys import Key, Role, SimpleKeys, digest
from mars_ray.serve.middleware.key_store import LiveKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Sender of a request."""

    key: str
    """Name of the key in logs and metrics."""
    owner: str
    """Owner of what the caller's requests store."""
    role: Role
    service_class: str | None
    """None means the first class."""


class Callers(Protocol):
    """All who have access."""

    async def identify(self, presented: str) -> Caller | None:
        """Return the caller, or None for an unknown key. Raises an `ApiError` for a caller without access."""


class KeyCallers:
    """All who have a key. Use it on one event loop."""

    def __init__(self, keys: LiveKeys[SimpleKeys]) -> None:
        self._keys = keys

    async def identify(self, presented: str) -> Caller | None:
        """Return the caller, or None for an unknown key. Raises an `ApiError` 401 for an expired key."""
        await self._keys.refresh()
        sha256 = digest(presented)
        key = self._keys.table.find(sha256)
        if key is None:
            return None
        check_expiry(key, sha256, self._keys)
        return Caller(
            key=key.name,
            owner=key.owner,
            role=key.role,
            service_class=check_class(key.service_class, self._keys.classes),
        )


def check_expiry(key: Key, sha256: str, keys: LiveKeys[Any]) -> None:
    """Raise an `ApiError` 401 if the secret with this hash is no longer valid."""
    if key.expired(sha256, keys.store.now()):
        message = "This API key has expired, or was replaced by a new one. Ask the operator for a new key."
        raise unauthorized(message, "invalid_api_key")


def check_class(name: str | None, classes: Collection[str] | None) -> str | None:
    """Return the class of a key. Raises an `ApiError` 403 if the endpoint has no such class; None allows all names."""
    if name is not None and classes is not None and name not in classes:
        raise forbidden(f"The class {name!r} of this key is not a class of this endpoint.")
    return name


def unauthorized(message: str, code: str) -> ApiError:
    """Return the 401 error for a request without access."""
    return ApiError(401, message, type="authentication_error", code=code, headers={"www-authenticate": "Bearer"})


def forbidden(message: str) -> ApiError:
    """Return the 403 error for a caller whose access is not sufficient."""
    return ApiError(403, message, type="permission_error", code="access_not_sufficient")

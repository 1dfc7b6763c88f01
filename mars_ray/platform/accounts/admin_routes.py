"""Routes for operators below `/admin`: keys, accounts and the audit log.

In:    the store of keys and the audit log of the endpoint.
Out:   routes. The access middleware allows them only for callers with the role `operate`.
Never: returns a key except in the answer to the request that makes it, or a hash of one.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import APIRouter, Query, Request, Response
from pydantic import AwareDatetime, BaseModel, Field

from mars_ray.chat.request_body import RequestBody
from mars_ray.errors import ConfigError, DataError, OutputError, RunError, UnknownNameError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.platform.accounts.account_store import Account, AccountKey, AccountStore, AccountTable, UsageLimits
from mars_ray.serve.middleware.api_keys import Role
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.middleware.json_body import JsonRoute
from mars_ray.serve.middleware.key_store import LiveKeys
from mars_ray.storage.audit_log import PAGE_MAX, AuditEvent, AuditLog

YEAR_S = 366 * 86400

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Administration:
    """Objects that operators change and read through a gateway."""

    keys: LiveKeys[AccountTable] | None
    """None if the endpoint has no keys."""
    store: AccountStore | None
    audit: AuditLog
    classes: Collection[str]
    """Classes of service that keys and accounts may name."""

    async def call(self, act: Callable[[AccountStore], T], service_class: str | None = None) -> T:
        """Return the result of an act on the store, which may name a class. Raises its errors as errors for
        operators."""
        if self.keys is None or self.store is None:
            message = "This endpoint has no keys. Set `keys` in its config file."
            raise ApiError(404, message, type="invalid_request_error", code="no_keys")
        if service_class not in (None, *self.classes):
            raise ApiError.bad_request(f"service_class must be one of {', '.join(self.classes)}.", "service_class")
        try:
            return await asyncio.to_thread(act, self.store)
        except UnknownNameError as error:
            raise ApiError(404, str(error), type="invalid_request_error", code="name_not_found") from None
        except ConfigError as error:
            raise ApiError.bad_request(str(error)) from None
        except (DataError, OutputError) as error:
            raise store_error(error) from None
        finally:
            self.keys.expire()  # a caller of this gateway sees the change at once


class KeyUpdate(RequestBody):
    """Body of `PATCH /admin/keys/NAME`: the fields to change. Null sets a field back to its default."""

    role: Role = "use"
    service_class: str | None = None
    account: str | None = None
    limits: UsageLimits | None = None
    expires: str | None = None
    """Date and time with an offset, such as 2027-01-31T00:00:00Z."""


class NewKeyRequest(KeyUpdate):
    """Body of `POST /admin/keys`."""

    name: str


class RotateRequest(RequestBody):
    """Body of `POST /admin/keys/NAME/rotate`."""

    grace_seconds: float = Field(86400.0, ge=0, le=YEAR_S)
    """Seconds for which the old key stays valid."""


class AccountRequest(RequestBody):
    """Body of `PUT /admin/accounts/NAME`, which replaces the whole entry."""

    service_class: str | None = None
    limits: UsageLimits | None = None


class KeyObject(BaseModel):
    """A key without its secret."""

    object: Literal["key"] = "key"
    name: str
    role: Role
    service_class: str | None
    account: str
    limits: UsageLimits
    created: str
    expires: AwareDatetime | None
    old_expires: AwareDatetime | None
    """Moment at which the secret before the last rotation ends."""


class NewKeyObject(BaseModel):
    """A key that was made by this request."""

    object: Literal["key.new"] = "key.new"
    name: str
    key: str
    """The key itself, which is not stored and cannot be shown again."""


class Listed(BaseModel, Generic[T]):
    """Response of `GET /admin/keys` and `GET /admin/accounts`."""

    object: Literal["list"] = "list"
    data: list[T]


class AuditList(Listed[AuditEvent]):
    """Response of `GET /admin/audit`: events, the newest first."""

    has_more: bool


def admin_routes(administration: Administration) -> APIRouter:
    """Return the routes under `/admin`."""
    routes = APIRouter(prefix="/admin", route_class=JsonRoute, redirect_slashes=False)
    _add_key_routes(routes, administration)
    _add_account_routes(routes, administration)

    @routes.get("/audit")
    async def audit(
        after: Annotated[str | None, Query(pattern=r"^[0-9a-f-]{1,64}$")] = None,
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    ) -> AuditList:
        """Return what operators and policies did, the newest first, before the event with the id `after`."""
        try:
            page = await asyncio.to_thread(administration.audit.read, after, limit)
        except RunError as error:
            raise store_error(error) from None
        return AuditList(data=list(page.events), has_more=page.has_more)

    return routes


def _add_key_routes(routes: APIRouter, administration: Administration) -> None:
    @routes.get("/keys")
    async def list_keys() -> Listed[KeyObject]:
        """Return all keys, without their secrets."""
        table = await administration.call(AccountStore.read)
        return Listed(data=[_key_object(key) for key in table.keys])

    @routes.post("/keys")
    async def add_key(body: NewKeyRequest, request: Request) -> NewKeyObject:
        """Add a key, and return it: it is not stored and cannot be shown again."""
        fields = {"role": body.role} | _fields(body)
        secret = await administration.call(lambda store: store.add(_operator(request), **fields), body.service_class)
        return NewKeyObject(name=body.name, key=secret)

    @routes.patch("/keys/{name}")
    async def update_key(name: str, body: KeyUpdate, request: Request) -> KeyObject:
        """Change a key, whose secret stays the same."""
        by = _operator(request)
        fields = _fields(body)
        return _key_object(
            await administration.call(lambda store: store.update(by, name, **fields), body.service_class)
        )

    @routes.post("/keys/{name}/rotate")
    async def rotate_key(name: str, body: RotateRequest, request: Request) -> NewKeyObject:
        """Give a key a new secret. The old one stays valid for a grace time."""
        secret = await administration.call(lambda store: store.rotate(_operator(request), name, body.grace_seconds))
        return NewKeyObject(name=name, key=secret)

    @routes.delete("/keys/{name}", status_code=204)
    async def remove_key(name: str, request: Request) -> Response:
        """Remove a key. Every gateway refuses it within about a second."""
        await administration.call(lambda store: store.remove(_operator(request), name))
        return Response(status_code=204)


def _add_account_routes(routes: APIRouter, administration: Administration) -> None:
    @routes.get("/accounts")
    async def list_accounts() -> Listed[Account]:
        """Return the accounts that have limits or a class of their own."""
        return Listed(data=list((await administration.call(AccountStore.read)).accounts))

    @routes.put("/accounts/{name}")
    async def set_account(name: str, body: AccountRequest, request: Request) -> Account:
        """Set the limits of an account, which hold for all its keys and tokens together."""
        by = _operator(request)
        fields = _fields(body) | {"name": name}
        return await administration.call(lambda store: store.set_account(by, **fields), body.service_class)

    @routes.delete("/accounts/{name}", status_code=204)
    async def remove_account(name: str, request: Request) -> Response:
        """Remove the limits of an account. Its keys stay valid."""
        await administration.call(lambda store: store.remove_account(_operator(request), name))
        return Response(status_code=204)


def store_error(error: Exception) -> ApiError:
    """Return the error for operators while what they change cannot be read or written."""
    return ApiError.unavailable(str(error), "store_unavailable", 5)


def _operator(request: Request) -> str:
    return Exchange.of(request.scope).operator


def _fields(body: RequestBody) -> dict[str, Any]:
    """Return the fields that were sent. Null stands for the default of a field."""
    sent = body.model_dump(exclude_unset=True)
    return sent | {"limits": sent["limits"] or {}} if "limits" in sent else sent


def _key_object(key: AccountKey) -> KeyObject:
    fields = key.model_dump(include={"name", "role", "service_class", "limits", "expires", "old_expires"})
    return KeyObject(**fields, account=key.owner, created=key.created.isoformat())

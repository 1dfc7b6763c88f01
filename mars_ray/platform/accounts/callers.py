"""Callers of accounts, recognised by an API key or by a token of an OpenID Connect provider.

In:    the text of a Bearer header.
Out:   the caller: name, account, role, class and limits.
Never: accepts a token whose signature, issuer, audience or time is wrong, reads claims before the signature is
       checked, or tells a caller which of these checks has failed.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from mars_ray.errors import ConfigError, UnavailableError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.platform.accounts.account_store import Account, AccountTable, UsageLimits
from mars_ray.platform.accounts.provider_keys import REFETCH_S, ProviderKeys
from mars_ray.platform.platform_config import OidcClaims, OidcSettings
from mars_ray.serve.middleware.api_keys import Role, digest, parse_entry
from mars_ray.serve.middleware.callers import Caller, check_class, check_expiry, forbidden, unauthorized
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.middleware.key_store import LiveKeys

log = logging.getLogger(__name__)

TOKEN_CHARS = 8192
"""Maximum length of a token."""
_KTY = {"R": "RSA", "P": "RSA", "E": "EC"}
"""JWK key type by the first letter of the algorithm. EdDSA is not listed, its key type is OKP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountCaller(Caller):
    """Sender of a request. With a token, the name of the key is `oidc:ACCOUNT`. The owner is the account."""

    limits: Mapping[str, UsageLimits]
    """Limits that the caller's requests count towards, by holder: `key:NAME` and `account:NAME`."""


def limits_of(exchange: Exchange) -> Mapping[str, UsageLimits]:
    """Return the limits that a request counts towards, by holder."""
    return exchange.caller.limits if isinstance(exchange.caller, AccountCaller) else {}


class AccountCallers:
    """All who have access. Without `oidc` only keys are accepted, and without `keys` only tokens.

    `classes` are the classes of service of the endpoint; None allows all names. Use it on one event loop.
    """

    def __init__(
        self,
        keys: LiveKeys[AccountTable] | None,
        oidc: OidcSettings | None = None,
        provider: ProviderKeys | None = None,
        *,
        classes: Collection[str] | None = None,
    ) -> None:
        self._keys = keys
        self._oidc = oidc
        self._provider = provider or (ProviderKeys(oidc) if oidc else None)
        self._classes = classes

    async def identify(self, presented: str) -> AccountCaller | None:
        """Return the caller, or None for an unknown API key.

        Raises an `ApiError` 401 for an expired key or a bad token, and 403 for a token whose claims name no account or
        class, and 503 if the provider's keys are needed and it does not answer.
        """
        if self._keys is not None:
            await self._keys.refresh()
        if self._oidc is not None and presented.count(".") == 2:  # no API key has a dot
            return await self._by_token(presented, self._oidc)
        return self._by_key(presented)

    async def has_access(self, key: str, account: str) -> bool:
        """Return whether the key of this name is still a valid key of its account. Tokens, and callers from before the
        endpoint had keys, count as valid."""
        if self._keys is None or not account or key == _token_key(account):
            return True
        await self._keys.refresh()
        now = self._keys.store.now()
        return any(
            entry.name == key and entry.owner == account and (entry.expires is None or entry.expires > now)
            for entry in self._keys.table.keys
        )

    async def row_caller(self, key: str, account: str) -> AccountCaller:
        """Return the caller of a batch's row, with the limits of its account, and those of its key unless the key was
        removed."""
        limits: Mapping[str, UsageLimits] = {}
        if self._keys is not None:
            await self._keys.refresh()
            own = next((entry.limits for entry in self._keys.table.keys if entry.name == key), UsageLimits())
            limits = _limits({f"key:{key}": own, f"account:{account}": self._account(account).limits})
        return AccountCaller(key=key, owner=account, role="use", service_class=None, limits=limits)

    def _by_key(self, presented: str) -> AccountCaller | None:
        sha256 = digest(presented)
        key = self._keys.table.find(sha256) if self._keys else None
        if self._keys is None or key is None:
            return None
        check_expiry(key, sha256, self._keys)
        account = self._account(key.owner)
        service_class = check_class(key.service_class or account.service_class, self._classes)
        return AccountCaller(
            key=key.name,
            owner=key.owner,
            role=key.role,
            service_class=service_class,
            limits=_limits({f"key:{key.name}": key.limits, f"account:{key.owner}": account.limits}),
        )

    async def _by_token(self, token: str, oidc: OidcSettings) -> AccountCaller:
        claims = await self._claims(token, oidc)
        names = _texts(claims, oidc.claims.account)
        try:
            account_name = parse_entry(Account, {"name": names[0] if len(names) == 1 else None}, "token").name
        except ConfigError:
            raise forbidden(f"The claim {oidc.claims.account!r} of the token names no account.") from None
        account = self._account(account_name)
        return AccountCaller(
            key=_token_key(account_name),
            owner=account_name,
            role=_role(claims, oidc.claims),
            service_class=self._class(claims, oidc.claims, account),
            limits=_limits({f"account:{account_name}": account.limits}),
        )

    async def _claims(self, token: str, oidc: OidcSettings) -> dict[str, Any]:
        """Return the claims of a token whose signature and time are right."""
        assert self._provider is not None
        if len(token) > TOKEN_CHARS:
            raise _bad_token(f"it has {len(token)} characters")
        try:
            head = jwt.get_unverified_header(token)
        except Exception as error:  # strangers choose the bytes; PyJWT lets errors of many classes through
            raise _bad_token(repr(error)) from None
        algorithm = head.get("alg")
        kid = head.get("kid")
        if algorithm not in oidc.algorithms or not isinstance(kid, str | None):
            raise _bad_token(f"alg is {algorithm!r}")
        try:
            key = await self._provider.get(kid)
        except UnavailableError as error:
            raise ApiError.unavailable(str(error), "unavailable", REFETCH_S) from None
        if key is None or _KTY.get(algorithm[0] if algorithm != "EdDSA" else "", "OKP") != key.key_type:
            raise _bad_token(f"the provider has no key {kid!r} for {algorithm}")
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=oidc.audience,
                issuer=oidc.issuer,
                leeway=oidc.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except Exception as error:  # as above
            raise _bad_token(repr(error)) from None
        return claims

    def _account(self, name: str) -> Account:
        stored = self._keys.table.account_of_name.get(name) if self._keys else None
        return stored or Account(name=name)

    def _class(self, claims: Mapping[str, Any], names: OidcClaims, account: Account) -> str | None:
        claimed = _texts(claims, names.service_class) if names.service_class else []
        candidates = claimed or ([account.service_class] if account.service_class else [])
        known = [name for name in candidates if self._classes is None or name in self._classes]
        if candidates and not known:
            raise forbidden("The token or its account names no class of this endpoint.")
        return known[0] if known else None


def _token_key(account: str) -> str:
    return f"oidc:{account}"


def _role(claims: Mapping[str, Any], names: OidcClaims) -> Role:
    return "operate" if names.role is not None and names.operate in _texts(claims, names.role) else "use"


def _texts(claims: Mapping[str, Any], path: str) -> list[str]:
    """Return the texts that a claim holds. A name with dots may also be the name of the claim itself."""
    value: Any = claims.get(path)
    if value is None:
        value = claims
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def _limits(by_holder: Mapping[str, UsageLimits]) -> Mapping[str, UsageLimits]:
    return {holder: limits for holder, limits in by_holder.items() if limits != UsageLimits()}


def _bad_token(reason: str) -> ApiError:
    log.info("a token was refused: %s", " ".join(reason.split())[:300])
    return unauthorized("The token is not valid: check its signature, issuer, audience and time.", "invalid_token")

"""Settings for tokens of an OpenID Connect provider, which callers may send instead of API keys."""

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Signature algorithms. All are asymmetric, because a symmetric key that checks tokens can also make them."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
ClaimName = str
"""Name of a claim. Dots lead into objects, as in `realm_access.roles`."""


class OidcClaims(BaseModel):
    """Claims of a token from which account, class and role follow. A claim may hold a text or a list of texts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    account: ClaimName = "sub"
    """Claim with the name of the account. Name one that users cannot choose, because it decides whose responses and
    limits they share."""
    service_class: ClaimName | None = None
    """Claim with the class of service; None means the class of the account, else the first class."""
    role: ClaimName | None = None
    """Claim with the role; None means that no token may operate."""
    operate: str = "operate"
    """Text in the claim `role` with which a token may operate."""


class OidcSettings(BaseModel):
    """A provider whose tokens the endpoint accepts. The gateways call out to it, and only to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    issuer: str
    """URL of the provider, exactly as in the claim `iss`."""
    audience: str = Field(min_length=1)
    """Text that the claim `aud` must contain, usually the id of this endpoint at the provider."""
    jwks_url: str | None = None
    """URL of the provider's public keys. None finds it at `ISSUER/.well-known/openid-configuration`."""
    algorithms: tuple[Algorithm, ...] = Field(("RS256", "ES256"), min_length=1)
    claims: OidcClaims = OidcClaims()
    leeway_s: float = Field(30, ge=0, le=300)
    """Seconds by which the clocks of the provider and of this machine may differ."""

    @model_validator(mode="after")
    def _urls_are_safe(self) -> Self:
        for name, url in (("issuer", self.issuer), ("jwks_url", self.jwks_url)):
            if url is not None and not is_safe(url):
                raise ValueError(f"{name} is {url!r}, must be an https:// URL (http:// for this machine only)")
        return self


def is_safe(url: str) -> bool:
    """Return whether the connection to a URL's host is encrypted, or stays on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK))

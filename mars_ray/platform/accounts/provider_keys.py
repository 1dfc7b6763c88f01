"""Public keys of an OpenID Connect provider, fetched by PyJWT and cached.

In:    key ids of tokens that anybody may send.
Out:   the key with an id, if the provider has it.
Never: lets callers cause more than one fetch in `REFETCH_S`, uses keys older than `STALE_S`, or blocks the event loop.
       Follows no redirect.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import httpx2
import jwt

from mars_ray.errors import UnavailableError
from mars_ray.platform.platform_config import OidcSettings, is_safe

log = logging.getLogger(__name__)

REFETCH_S = 30.0
"""Seconds between two fetches for unknown key ids, or after a failure."""
RENEW_S = 600.0
"""Age in seconds at which keys are fetched again while the old ones are still used."""
STALE_S = 86400.0
"""Age in seconds at which keys expire, even while the provider does not answer."""
FETCH_S = 5.0
"""Seconds that the provider may be silent, and that a caller waits for a fetch."""


class ProviderKeys:
    """The keys of one provider. Use it on one event loop."""

    def __init__(self, settings: OidcSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._keys: Sequence[jwt.PyJWK] = ()
        self._fetched_s = float("-inf")
        self._tried_s = float("-inf")
        self._fetch: asyncio.Task[None] | None = None

    async def get(self, kid: str | None) -> jwt.PyJWK | None:
        """Return the key with an id, or None if the provider has no such key. A provider with one key needs no id.

        Raises `UnavailableError` if the provider's keys are unknown because it does not answer.
        """
        key = self._find(kid)
        if key is None or self._clock() - self._fetched_s >= RENEW_S:
            self._start()
        if key is None and self._fetch is not None:
            await asyncio.wait([self._fetch], timeout=FETCH_S)
            key = self._find(kid)
        if key is None and not self._fresh():
            raise UnavailableError("the identity provider does not answer. Try again, or use an API key.")
        return key

    def _fresh(self) -> bool:
        return self._clock() - self._fetched_s < STALE_S

    def _find(self, kid: str | None) -> jwt.PyJWK | None:
        if not self._fresh():
            return None
        if kid is None and len(self._keys) == 1:
            return self._keys[0]
        return next((key for key in self._keys if key.key_id == kid), None)

    def _start(self) -> None:
        """Begin a fetch unless one runs or the last one was begun less than `REFETCH_S` ago."""
        if self._fetch is None and self._clock() - self._tried_s >= REFETCH_S:
            self._tried_s = self._clock()
            self._fetch = asyncio.create_task(self._fetch_once())

    async def _fetch_once(self) -> None:
        try:
            self._keys = await asyncio.to_thread(_signing_keys, self._settings)
            self._fetched_s = self._clock()
        except Exception as error:  # PyJWT lets errors of many classes through
            log.error("the keys of %s cannot be fetched: %s.", self._settings.issuer, " ".join(str(error).split()))
        finally:
            self._fetch = None


def _signing_keys(settings: OidcSettings) -> list[jwt.PyJWK]:
    """Fetch the keys. Raises errors of many classes."""
    url = settings.jwks_url or _discovered_url(settings.issuer)
    # The cache of `PyJWKClient` has no bound for fetches that fail.
    return jwt.PyJWKClient(url, cache_jwk_set=False, timeout=FETCH_S).get_signing_keys()


def _discovered_url(issuer: str) -> str:
    url = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
    metadata = httpx2.get(url, timeout=FETCH_S).raise_for_status().json()
    if metadata["issuer"] != issuer:
        raise ValueError(f"{url} is about the issuer {str(metadata['issuer'])[:200]!r}")
    if not is_safe(metadata["jwks_uri"]):
        raise ValueError(f"{url} names no jwks_uri with https://")
    return str(metadata["jwks_uri"])

"""Public keys of an OpenID Connect provider, read by PyJWT and cached.

In:    key ids of tokens that anybody may send.
Out:   the key with an id, if the provider has it.
Never: lets callers cause more than one fetch in `REFETCH_S`, uses keys older than `STALE_S`, or blocks the event loop.
       Follows no redirect, and reads no more than `FETCH_BYTES` within `FETCH_S` from one address.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

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
"""Seconds that a fetch from one address may take, and that a caller waits."""
FETCH_BYTES = 2**20
"""Maximum size of what is fetched from one address."""


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
    return _KeyClient(url, cache_jwk_set=False).get_signing_keys()


class _KeyClient(jwt.PyJWKClient):
    """PyJWT's client with bounds, because its own fetch has none for the size and for the whole time."""

    def fetch_data(self) -> Any:
        """Return the JSON of the keys."""
        return _fetched(self.uri)


def _discovered_url(issuer: str) -> str:
    url = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
    metadata = _fetched(url)
    if metadata["issuer"] != issuer:
        raise ValueError(f"{url} is about the issuer {str(metadata['issuer'])[:200]!r}")
    if not is_safe(metadata["jwks_uri"]):
        raise ValueError(f"{url} names no jwks_uri with https://")
    return str(metadata["jwks_uri"])


def _fetched(url: str) -> Any:
    """Return the JSON at a URL. Raises errors of many classes."""
    # On an event loop of its own, because only `asyncio.timeout` bounds a whole fetch; httpx2 bounds each read.
    return json.loads(asyncio.run(_content(url)))


async def _content(url: str) -> bytes:
    content = bytearray()
    uncompressed = {"accept-encoding": "identity"}
    try:
        async with (
            httpx2.AsyncClient(timeout=None) as client,
            asyncio.timeout(FETCH_S),
            client.stream("GET", url, headers=uncompressed) as response,
        ):
            async for part in response.raise_for_status().aiter_raw():
                content += part
                if len(content) > FETCH_BYTES:
                    raise ValueError(f"{url} sends more than {FETCH_BYTES} bytes")
    except TimeoutError:
        raise TimeoutError(f"{url} did not answer completely within {FETCH_S:g} s") from None
    return bytes(content)

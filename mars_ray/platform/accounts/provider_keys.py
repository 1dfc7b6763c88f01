"""Public keys of an OpenID Connect provider, fetched over HTTP and cached.

In:    key ids of tokens that anybody may send.
Out:   the key with an id, if the provider has it.
Never: lets callers cause more than one fetch in `REFETCH_S`, waits longer than `WAIT_S`, or reads more than
       `BODY_BYTES` of an answer. Follows no redirect.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx2
import jwt

from mars_ray.errors import UnavailableError
from mars_ray.platform.accounts.oidc_settings import OidcSettings, is_safe

log = logging.getLogger(__name__)

REFETCH_S = 30.0
"""Seconds between two fetches for unknown key ids, or after a failure."""
RENEW_S = 600.0
"""Age in seconds at which keys are fetched again while the old ones are still used."""
STALE_S = 86400.0
"""Age in seconds at which keys are no longer used, although the provider does not answer."""
FETCH_S = 5.0
"""Seconds that one request to the provider may take in all."""
WAIT_S = 2 * FETCH_S + 1
BODY_BYTES = 256 * 2**10
KEYS_MAX = 100
ASYMMETRIC = ("RSA", "EC", "OKP")


class ProviderKeys:
    """The keys of one provider. Use it on one event loop."""

    def __init__(
        self,
        settings: OidcSettings,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._transport = transport
        self._keys: Mapping[str | None, jwt.PyJWK] = {}
        self._fetched_s: float | None = None
        self._tried_s: float | None = None
        self._fetch: asyncio.Task[None] | None = None
        self._complaint = ""

    async def get(self, kid: str | None) -> jwt.PyJWK | None:
        """Return the key with an id, or None if the provider has no such key. A provider with one key needs no id.

        Raises `UnavailableError` if the provider's keys are unknown because it does not answer.
        """
        key = self._find(kid)
        if key is not None:
            if self._age_s(self._fetched_s) >= RENEW_S:
                self._start()  # in the background: this caller has its key
            return key
        self._start()
        if self._fetch is not None:
            await asyncio.wait([self._fetch], timeout=WAIT_S)
            key = self._find(kid)
        if key is None and self._age_s(self._fetched_s) >= STALE_S:
            raise UnavailableError("the identity provider does not answer. Try again, or use an API key.")
        return key

    def _find(self, kid: str | None) -> jwt.PyJWK | None:
        if self._age_s(self._fetched_s) >= STALE_S:
            return None
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(kid)

    def _age_s(self, then_s: float | None) -> float:
        return float("inf") if then_s is None else self._clock() - then_s

    def _start(self) -> None:
        """Begin a fetch unless one runs or the last one was begun less than `REFETCH_S` ago."""
        if self._fetch is None and self._age_s(self._tried_s) >= REFETCH_S:
            self._tried_s = self._clock()
            self._fetch = asyncio.create_task(self._fetch_once())

    async def _fetch_once(self) -> None:
        try:
            self._keys = await self._fetch_keys()
            self._fetched_s = self._clock()
            self._complaint = ""
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError, ValueError, RecursionError) as error:
            complaint = " ".join(str(error).split()) or type(error).__name__
            if complaint != self._complaint:
                self._complaint = complaint
                log.error("the keys of %s cannot be fetched: %s.", self._settings.issuer, complaint)
        finally:
            self._fetch = None

    async def _fetch_keys(self) -> Mapping[str | None, jwt.PyJWK]:
        # In a thread, because reading the certificates of authorities takes longer than callers should wait.
        async with await asyncio.to_thread(self._client) as client:
            url = self._settings.jwks_url or await self._discover(client)
            entries = (await _get(client, url)).get("keys")
        if not isinstance(entries, list):
            raise ValueError(f"{url} has no list of keys")
        keys: dict[str | None, jwt.PyJWK] = {}
        for entry in entries[:KEYS_MAX]:
            try:
                key = jwt.PyJWK(entry)
            except Exception:  # a key of a kind that this version does not know; PyJWT raises errors of many classes
                continue
            signs = key.key_type in ASYMMETRIC and entry.get("use", "sig") == "sig"
            if signs and isinstance(key.key_id, str | None):
                keys[key.key_id] = key
        if not keys:
            raise ValueError(f"{url} has no key that can be used")
        return keys

    def _client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=self._transport, follow_redirects=False, timeout=FETCH_S)

    async def _discover(self, client: httpx2.AsyncClient) -> str:
        url = f"{self._settings.issuer.rstrip('/')}/.well-known/openid-configuration"
        metadata = await _get(client, url)
        if metadata.get("issuer") != self._settings.issuer:
            raise ValueError(f"{url} is about the issuer {str(metadata.get('issuer'))[:200]!r}")
        jwks_url = metadata.get("jwks_uri")
        if not isinstance(jwks_url, str) or not is_safe(jwks_url):
            raise ValueError(f"{url} names no jwks_uri with https://")
        return jwks_url


async def _get(client: httpx2.AsyncClient, url: str) -> dict[str, Any]:
    """Return the JSON object at a URL. Raises `ValueError` for any other answer."""
    content = b""
    async with asyncio.timeout(FETCH_S), client.stream("GET", url) as response:
        if response.status_code != 200:
            raise ValueError(f"{url} answered HTTP {response.status_code}")
        async for part in response.aiter_bytes(16384):
            content += part
            if len(content) > BODY_BYTES:
                raise ValueError(f"{url} answered more than {BODY_BYTES} bytes")
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError(f"{url} answered no JSON object")
    return value

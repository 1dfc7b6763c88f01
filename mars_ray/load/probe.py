"""Ask an endpoint whether it is there, and which model it serves, before any load."""

import asyncio
import json
from urllib.parse import urlsplit

import aiohttp

from mars_ray.errors import ConfigError, RunError
from mars_ray.load.client import BODY_BYTES_MAX, open_session, read_text

TIMEOUT_S = 10.0


def parse_url(text: str) -> str:
    """Return the URL without /v1 and without a slash at its end. Raises `ConfigError`."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConfigError(f"url is {text!r}; give one such as http://127.0.0.1:8000.") from None
    if parts.username or parts.password:
        raise ConfigError("url holds a user or a password, which would end in reports; give a key with --api-key.")
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"url is {text!r}; give one such as http://127.0.0.1:8000.")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


async def find_model(url: str, api_key: str | None, asked: str | None) -> str:
    """Return `asked`, or the first model that is listed. Raises `RunError` when nobody answers or nothing is listed."""
    try:
        async with open_session(api_key) as session, asyncio.timeout(TIMEOUT_S), session.get(f"{url}/v1/models") as got:
            listed = await read_text(got, BODY_BYTES_MAX)
    except TimeoutError:
        raise RunError(
            f"{url} did not answer within {TIMEOUT_S:g} s. Wait until the server is up, or check --url."
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise RunError(f"{url} cannot be reached ({error}). Start the server, or check --url.") from None
    if asked is not None:
        return asked
    try:
        name = json.loads(listed)["data"][0]["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise RunError(f"{url}/v1/models answered HTTP {got.status} and lists no model. Give --model, or --api-key.")
    return name

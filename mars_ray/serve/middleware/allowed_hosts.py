"""Check Host and Origin, against DNS rebinding and requests made by foreign web pages.

In:    the names this endpoint is reached by; the headers Host and Origin of a request, and Sec-Fetch-Site, which a
       browser sends where it sends no Origin: with the images and scripts of a page.
Out:   nothing, or an `ApiError`.
Never: looks a name up, or lets an answer depend on a port: a port is not what an attacker controls.
"""

import re
from collections.abc import Iterable

from mars_ray.errors import ConfigError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.serve.middleware.scope import Headers, values

_HOST = rb"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)"
_AUTHORITY = re.compile(_HOST + rb"(?::[0-9]{0,5})?")
_OWN_SITE = frozenset({b"same-origin", b"none"})
"""Values of Sec-Fetch-Site for our own pages and for typed addresses."""
_ORIGIN = re.compile(rb"[a-z][a-z0-9+.-]*://" + _HOST + rb"(?::[0-9]{0,5})?")


class AllowedHosts:
    """The names of this endpoint, without port; IPv6 with or without brackets; "*" allows everything."""

    def __init__(self, names: Iterable[str]) -> None:
        names = set(names)
        self._any = "*" in names
        self._names = {_own_name(name) for name in names - {"*"}}

    def check(self, headers: Headers, *, page: bool = False) -> None:
        """Raise an `ApiError` unless Host names this endpoint and no foreign page sent the request.

        A link on a foreign page may lead to a `page`.
        """
        if self._any:
            return
        hosts = values(headers, b"host")
        found = _AUTHORITY.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
        if not found:  # RFC 9112, 3.2 demands 400 for a request with no Host, several or a malformed one.
            raise ApiError(
                400,
                "Send exactly one Host header, a name or an address.",
                type="invalid_request_error",
                code="bad_host",
            )
        if found[1] not in self._names:  # RFC 9110, 7.4 has 421 for one that was sent to the wrong server.
            raise ApiError(
                421,
                "The Host header does not name this endpoint. Call it by a name it is configured to answer to.",
                type="invalid_request_error",
                code="unknown_host",
            )
        for origin in values(headers, b"origin"):
            named = _ORIGIN.fullmatch(origin.lower())
            if not named or named[1] not in self._names:  # "null", which a sandboxed frame sends, is nobody's page.
                raise _foreign_page()
        followed = page and values(headers, b"sec-fetch-mode") == [b"navigate"]
        if not followed and not _OWN_SITE.issuperset(values(headers, b"sec-fetch-site")):
            raise _foreign_page()


def _foreign_page() -> ApiError:
    message = "Web pages of other sites may not call this endpoint."
    return ApiError(403, message, type="permission_error", code="foreign_origin")


def _own_name(name: str) -> bytes:
    """Return `name` in the form of a Host header. Raises `ConfigError` for a name that no header can match."""
    lower = name.lower().encode(errors="replace")
    written = b"[" + lower + b"]" if lower.count(b":") > 1 and not lower.startswith(b"[") else lower
    if not re.fullmatch(_HOST, written):
        raise ConfigError(f"allowed host {name!r} is no host name or address. Leave out scheme, port and path.")
    return written

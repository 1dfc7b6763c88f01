"""Check Host and Origin to prevent DNS rebinding and requests from foreign web pages.

In:    the names of this endpoint; the headers Host, Origin and Sec-Fetch-Site of a request. For the images and scripts
       of a page, a browser sends Sec-Fetch-Site but no Origin.
Out:   nothing, or an `ApiError`.
Never: resolves a name, or compares ports, because an attacker does not control the port.
"""

import re
from collections.abc import Iterable

from mars_ray.openai_api.api_error import ApiError
from mars_ray.serve.middleware.scope import Headers, values

_HOST = rb"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)"
_AUTHORITY = re.compile(_HOST + rb"(?::[0-9]{0,5})?")
_OWN_SITE = frozenset({b"same-origin", b"none"})
"""Values of Sec-Fetch-Site for requests from our own pages and for addresses that the user has typed."""
_ORIGIN = re.compile(rb"[a-z][a-z0-9+.-]*://" + _HOST + rb"(?::[0-9]{0,5})?")


class AllowedHosts:
    """Names of this endpoint, which `host_of` must take. "*" allows every name."""

    def __init__(self, names: Iterable[str]) -> None:
        names = set(names)
        self._any = "*" in names
        self._names = {host_of(name) for name in names - {"*"}}

    def check(self, headers: Headers, *, page: bool = False) -> None:
        """Raise an `ApiError` unless Host names this endpoint and no foreign page sent the request.

        A `page` may also be opened from a link on a foreign page.
        """
        if self._any:
            return
        hosts = values(headers, b"host")
        authority = _AUTHORITY.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
        if not authority:  # RFC 9112, section 3.2, demands 400 for a missing, repeated or malformed Host
            raise ApiError(
                400,
                "Send exactly one Host header, a name or an address.",
                type="invalid_request_error",
                code="bad_host",
            )
        if authority[1] not in self._names:  # RFC 9110, section 7.4, defines 421 for the wrong server
            raise ApiError(
                421,
                "The Host header does not name this endpoint. Use one of the names it is configured for.",
                type="invalid_request_error",
                code="unknown_host",
            )
        for origin in values(headers, b"origin"):
            site = _ORIGIN.fullmatch(origin.lower())
            if not site or site[1] not in self._names:  # a sandboxed frame sends "null", which counts as foreign
                raise _foreign_page()
        is_link = page and values(headers, b"sec-fetch-mode") == [b"navigate"]
        if not is_link and not _OWN_SITE.issuperset(values(headers, b"sec-fetch-site")):
            raise _foreign_page()


def _foreign_page() -> ApiError:
    message = "Web pages of other sites may not call this endpoint."
    return ApiError(403, message, type="permission_error", code="foreign_origin")


def host_of(name: str) -> bytes:
    """Return a name without a port as it appears in a Host header. IPv6 addresses may have brackets.

    Raises a `ValueError` for a name that no header can match.
    """
    lower = name.lower().encode(errors="replace")
    host = b"[" + lower + b"]" if lower.count(b":") > 1 and not lower.startswith(b"[") else lower
    if not re.fullmatch(_HOST, host):
        raise ValueError(f"{name!r} is not a host name or address; leave out scheme, port and path")
    return host

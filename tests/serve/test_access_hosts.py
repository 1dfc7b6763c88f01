"""Requests must be small and meant for this endpoint; request ids and our headers hold."""

import re
from typing import Any

import pytest

from mars_ray.errors import ConfigError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.serve.middleware.allowed_hosts import AllowedHosts
from mars_ray.serve.middleware.exchange import Exchange
from tests.serve.access_samples import (
    HOST,
    OK_BODY,
    Inner,
    KnownKeys,
    access,
    bearer,
    call,
    scope_of,
)
from tests.serve.endpoint_samples import config_of

# --- request id ---


def test_a_sane_request_id_is_kept_and_reaches_app_and_caller(keys: KnownKeys) -> None:
    inner = Inner()
    client = call(access(inner, keys), scope_of("/v1/x", [HOST, bearer(keys.use), (b"x-request-id", b"a.B_9-")]))
    assert client.headers[b"x-request-id"] == b"a.B_9-"
    seen = Exchange.of(inner.scopes[0])
    assert (seen.request_id, seen.key) == ("a.B_9-", "ada")


@pytest.mark.parametrize(
    "sent", [[], [b""], [b"a b"], [b"a\nb"], [b"a\n"], [b"x" * 129], [b"\xff"], ["é".encode()], [b"a", b"b"]]
)
def test_any_other_request_id_is_replaced(sent: list[bytes]) -> None:
    inner = Inner()
    client = call(access(inner), scope_of("/v1/x", [HOST, *((b"x-request-id", each) for each in sent)]))
    assert client.headers[b"x-request-id"] == b"made-here"
    assert Exchange.of(inner.scopes[0]).request_id == "made-here"


def test_state_of_the_server_is_kept_and_not_written_to(keys: KnownKeys) -> None:
    shared = {"engine": 1, "exchange": "forged"}
    inner = Inner()
    call(access(inner, keys), scope_of("/v1/x", [HOST, bearer(keys.use)], state=shared))
    call(access(inner, keys), scope_of("/healthz", [HOST], state=shared))
    assert [scope["state"]["engine"] for scope in inner.scopes] == [1, 1]
    assert [Exchange.of(scope).key for scope in inner.scopes] == ["ada", None]
    assert shared == {"engine": 1, "exchange": "forged"}


def test_our_headers_replace_those_of_the_app() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Cache-Control", b"public"), (b"X-Request-Id", b"other"), (b"etag", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(OK_BODY)

    client = call(access(Inner(answer)), scope_of("/v1/x", [HOST]))
    assert sorted(client.received[0]["headers"]) == [
        (b"cache-control", b"no-store"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"etag", b"1"),
        (b"x-content-type-options", b"nosniff"),
        (b"x-request-id", b"made-here"),
    ]


# --- size of the head ---


@pytest.mark.parametrize(
    "more",
    [
        {"headers": [HOST, (b"a", b"x" * 200)]},
        {"headers": [HOST, *[(b"", b"")] * 60]},
        {"headers": [HOST], "query_string": b"x" * 200},
        {"headers": [HOST], "path": "/" + "x" * 200, "raw_path": b"/" + b"x" * 200},
    ],
)
def test_a_head_beyond_the_limit_is_431(more: dict[str, Any]) -> None:
    inner = Inner()
    client = call(access(inner, header_bytes=200), scope_of("/v1/x") | more)
    assert (client.status, client.error["code"], inner.scopes) == (431, "headers_too_large", [])


def test_a_head_of_just_the_limit_passes() -> None:
    size = len(b"/v1/x") + len(b"host") + len(b"localhost:8000") + 4
    assert call(access(Inner(), header_bytes=size), scope_of("/v1/x", [HOST])).status == 200
    assert call(access(Inner(), header_bytes=size - 1), scope_of("/v1/x", [HOST])).status == 431


# --- hosts and origins ---


def hosted(names: set[str], headers: list[tuple[bytes, bytes]]) -> int:
    try:
        AllowedHosts(names).check(headers)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost", 200),
        (b"LocalHost:8000", 200),
        (b"localhost:", 200),
        (b"[::1]:8000", 200),
        (b"[::1]", 200),
        (b"10.0.0.7:80", 200),
        (b"evil.example", 421),
        (b"localhost.evil.example", 421),
        (b"evil-localhost", 421),
        (b"localhost.", 421),
        (b"[::2]", 421),
        (b"::1", 400),
        (b"", 400),
        (b"localhost:80:80", 400),
        (b"localhost@evil.example", 400),
        (b"localhost/evil", 400),
        (b"localhost, evil.example", 400),
        (b"localhost\xff", 400),
        (b"localhost:8000\n", 400),
    ],
)
def test_only_names_of_this_endpoint_are_answered(host: bytes, status: int) -> None:
    assert hosted({"LOCALHOST", "::1", "10.0.0.7"}, [(b"host", host)]) == status


def test_a_request_without_a_host_or_with_two_is_malformed() -> None:
    assert hosted({"localhost"}, []) == 400
    assert hosted({"localhost"}, [HOST, HOST]) == 400
    assert hosted({"localhost"}, [HOST, (b"host", b"evil.example")]) == 400


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (b"http://localhost:3000", 200),
        (b"https://LOCALHOST", 200),
        (b"http://evil.example", 403),
        (b"http://localhost.evil.example", 403),
        (b"http://localhost@evil.example", 403),
        (b"null", 403),
        (b"", 403),
        (b"localhost", 403),
        (b"http://localhost\xe9", 403),
    ],
)
def test_pages_of_other_sites_are_refused(origin: bytes, status: int) -> None:
    assert hosted({"localhost"}, [HOST, (b"origin", origin)]) == status
    assert hosted({"localhost"}, [HOST, (b"origin", b"http://localhost"), (b"origin", origin)]) == status


def test_a_star_allows_every_host_and_origin() -> None:
    assert hosted({"*"}, []) == 200
    assert hosted({"*", "localhost"}, [(b"host", b"evil"), (b"origin", b"null")]) == 200


@pytest.mark.parametrize(
    "name", ["http://localhost", "localhost:8000", "", "a b", "*.example", "[::1]:80", "localhost/"]
)
def test_a_config_with_an_allowed_host_that_could_never_match_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"allowed_hosts: {name!r} is not a host name or address")):
        config_of(allowed_hosts=["localhost", name])


def test_a_config_may_name_hosts_addresses_and_a_star() -> None:
    names = ["api.example.com", "10.0.0.7", "::1", "[::1]", "*"]
    assert config_of(allowed_hosts=names).allowed_hosts == frozenset(names)


def test_a_foreign_host_is_refused_before_the_key_is_looked_at_even_on_open_paths(keys: KnownKeys) -> None:
    inner = Inner()
    for path in ("/v1/x", "/healthz"):
        client = call(access(inner, keys), scope_of(path, [(b"host", b"evil.example")]))
        assert (client.status, client.error["code"]) == (421, "unknown_host")
    assert inner.scopes == []


# --- what browsers say of the page that asks ---

PAGE = "/cluster"


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/control/live", "/healthz", PAGE])
@pytest.mark.parametrize("site", [b"cross-site", b"same-site", b"else", b""])
def test_what_other_sites_embed_is_refused_wherever_it_is(path: str, site: bytes) -> None:
    inner = Inner()
    app = access(inner, pages=frozenset({PAGE}))
    client = call(app, scope_of(path, [HOST, (b"sec-fetch-site", site), (b"sec-fetch-mode", b"no-cors")]))
    assert (client.status, client.error["code"], inner.scopes) == (403, "foreign_origin", [])


@pytest.mark.parametrize(("path", "status"), [(PAGE, 200), ("/version", 403), ("/healthz", 403)])
def test_a_link_of_another_site_leads_to_pages_only(path: str, status: int) -> None:
    app = access(Inner(), pages=frozenset({PAGE}))
    sent = [HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")]
    assert call(app, scope_of(path, sent)).status == status


@pytest.mark.parametrize("site", [b"same-origin", b"none"])
def test_our_own_pages_and_what_a_person_types_are_answered(site: bytes) -> None:
    assert call(access(Inner()), scope_of("/version", [HOST, (b"sec-fetch-site", site)])).status == 200

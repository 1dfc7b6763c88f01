"""Nobody comes in without a key of the right role, whatever the spelling of the path."""

from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.middleware.scope import OPEN_PATHS
from tests.serve.access_samples import (
    HOST,
    Inner,
    KnownKeys,
    access,
    bearer,
    call,
    scope_of,
)
from tests.serve.key_samples import BY, add_key, key_file, live_keys

# --- keys and roles ---

SPELLINGS = [
    "/healthz/",
    "//healthz",
    "/./healthz",
    "/v1/../healthz",
    "/%68ealthz",
    "/healthz%0a",
    "/healthz%00",
    "/healthz%2f",
    "/%2e/healthz",
    "/HEALTHZ",
    "/healthz;x",
    "/healthz%3f",
    "healthz",
    "http://localhost/healthz",
    "",
    "/",
    "*",
]


@pytest.mark.parametrize("path", SPELLINGS)
def test_every_other_spelling_of_an_open_path_needs_a_key(keys: KnownKeys, path: str) -> None:
    inner = Inner()
    assert call(access(inner, keys), scope_of(path, [HOST])).status == 401
    assert inner.scopes == []


def test_open_paths_are_found_behind_the_root_path_as_the_router_does(keys: KnownKeys) -> None:
    app = access(Inner(), keys)
    assert call(app, scope_of("/healthz", [HOST])).status == 200
    assert call(app, scope_of("/api/healthz", [HOST], root_path="/api")).status == 200
    assert call(app, scope_of("/api/healthz", [HOST])).status == 401
    assert call(app, scope_of("/apihealthz", [HOST], root_path="/api")).status == 401
    assert call(app, scope_of("/api", [HOST], root_path="/api")).status == 401


@given(
    path=st.one_of(
        st.text(max_size=30).map(quote),
        st.lists(
            st.sampled_from(
                [
                    "/",
                    "//",
                    ".",
                    "..",
                    "%2e",
                    "%2f",
                    "health",
                    "healthz",
                    "z",
                    "readyz",
                    "ping",
                    "v1",
                    "%00",
                    "%0a",
                    "?",
                ]
            )
        ).map("".join),
    ),
    root=st.sampled_from(["", "/", "/v1", "/healthz", "/readyz/"]),
    method=st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "BREW"]),
)
def test_without_a_key_only_open_paths_reach_the_app(keys: KnownKeys, path: str, root: str, method: str) -> None:
    inner = Inner()
    client = call(access(inner, keys), scope_of(path, [HOST], root_path=root, method=method))
    if inner.scopes:
        assert path.removeprefix(root) in OPEN_PATHS or path in OPEN_PATHS
    else:
        assert client.status == 401


def routed(reached: list[str]) -> Starlette:
    """A real router: a path the middleware takes for another than the router does would show."""

    async def endpoint(request: Request) -> PlainTextResponse:
        reached.append(request.scope["route"].path)
        return PlainTextResponse("ok")

    paths = ["/healthz", "/readyz", "/metrics", "/v1/models", "/v1/models/{name:path}"]
    return Starlette(routes=[Route(path, endpoint, methods=["GET", "POST"]) for path in paths])


@given(
    st.lists(
        st.sampled_from(["/", "healthz", "metrics", "v1/", "models", "..", "%2e%2e", "%2F", "%0A", "%0D", "%00", ";"]),
        max_size=6,
    ).map("".join)
)
def test_no_path_leads_past_key_or_role_to_a_route_that_needs_them(keys: KnownKeys, path: str) -> None:
    for key, allowed in ((None, {"/healthz"}), (keys.use, {"/healthz", "/v1/models", "/v1/models/{name:path}"})):
        reached: list[str] = []
        call(access(routed(reached), keys), scope_of(path, [HOST, *([bearer(key)] if key else [])]))
        assert set(reached) <= allowed


def test_a_line_feed_behind_an_operators_path_is_that_path_to_the_router_and_to_us(keys: KnownKeys) -> None:
    reached: list[str] = []
    app = access(routed(reached), keys)
    assert call(app, scope_of("/metrics%0a", [HOST, bearer(keys.use)])).status == 403
    assert call(app, scope_of("/metrics%0a", [HOST, bearer(keys.operate)])).status == 200
    assert reached == ["/metrics"]


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer mars-unknown"],
        [b"Basic %s"],
        [b"Bearer%s"],
        [b"Bearer %s x"],
        [b"Bearer %s, Bearer %s"],
        [b"Bearer\t%s"],
        [b"Bearer \xff%s"],
        [b"%s"],
        [b"Bearer %s", b"Bearer %s"],
        [b"Bearer mars-unknown", b"Bearer %s"],
        [b"Bearer %s", b""],
    ],
)
def test_a_missing_malformed_unknown_or_repeated_key_is_401(keys: KnownKeys, sent: list[bytes]) -> None:
    inner = Inner()
    headers = [(b"authorization", each.replace(b"%s", keys.use.encode())) for each in sent]
    client = call(access(inner, keys), scope_of("/v1/x", [HOST, *headers]))
    assert (client.status, client.headers[b"www-authenticate"], inner.scopes) == (401, b"Bearer", [])
    assert client.error["code"] == "invalid_api_key"
    assert client.error["type"] == "authentication_error"
    assert "mars-" not in str(client.error)


def test_only_the_authorization_header_carries_a_key(keys: KnownKeys) -> None:
    elsewhere = [(b"x-api-key", keys.use.encode()), (b"api-key", keys.use.encode()), (b"cookie", keys.use.encode())]
    scope = scope_of("/v1/x", [HOST, *elsewhere], query_string=b"api_key=" + keys.use.encode())
    assert call(access(Inner(), keys), scope).status == 401


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER   "])
def test_the_scheme_is_read_in_any_case_as_its_standard_says(keys: KnownKeys, scheme: bytes) -> None:
    headers = [HOST, (b"Authorization", scheme + keys.use.encode())]
    assert call(access(Inner(), keys), scope_of("/v1/x", headers)).status == 200


def test_a_key_of_the_role_use_may_not_operate(keys: KnownKeys) -> None:
    inner = Inner()
    app = access(inner, keys)
    refused = call(app, scope_of("/metrics", [HOST, bearer(keys.use)]))
    assert (refused.status, refused.error["type"], inner.scopes) == (403, "permission_error", [])
    assert refused.error["code"] == "role_not_sufficient"
    assert call(app, scope_of("/metrics", [HOST, bearer(keys.operate)])).status == 200
    assert call(app, scope_of("/v1/x", [HOST, bearer(keys.operate)])).status == 200


def test_without_a_key_file_everybody_is_anonymous_and_may_operate() -> None:
    inner = Inner()
    assert call(access(inner), scope_of("/metrics", [HOST])).status == 200
    assert Exchange.of(inner.scopes[0]).key == "anonymous"


def test_a_revoked_key_stops_working_while_it_runs(tmp_path: Path) -> None:
    path, now = tmp_path / "keys.yaml", [0.0]
    ada = add_key(path, "ada", "operate")
    app = access(Inner(), KnownKeys(live_keys(path, lambda: now[0]), ada, ada, ada))
    assert call(app, scope_of("/v1/x", [HOST, bearer(ada)])).status == 200
    path.write_text("keys: []")
    now[0] += 1
    assert call(app, scope_of("/v1/x", [HOST, bearer(ada)])).status == 401


@pytest.mark.platform
def test_a_rotated_key_owns_what_its_account_stored_and_another_account_owns_none_of_it(tmp_path: Path) -> None:
    path, now, inner = tmp_path / "keys.yaml", [0.0], Inner()
    old = add_key(path, "ada", "use", account="team")
    other = add_key(path, "bob", "use")
    app = access(inner, KnownKeys(live_keys(path, lambda: now[0]), old, old, old))
    new = key_file(path).rotate(BY, "ada", 3600)
    now[0] += 1
    for key in (old, new, other):
        call(app, scope_of("/v1/x", [HOST, bearer(key)]))
    exchanges = [Exchange.of(scope) for scope in inner.scopes]
    assert [exchange.owner for exchange in exchanges] == ["team", "team", "bob"]


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=8), st.booleans())
def test_no_bytes_in_headers_crash_it_or_let_a_stranger_in(
    keys: KnownKeys, headers: list[tuple[bytes, bytes]], hosted: bool
) -> None:
    inner = Inner()
    client = call(access(inner, keys), scope_of("/v1/x", [*headers, *([HOST] if hosted else [])]))
    assert client.status in (400, 401, 403, 421)
    assert inner.scopes == []


GARBAGE = st.one_of(st.binary(max_size=30), st.sampled_from([b"\xff", b"9" * 5000, b"-1", b"1e9", b"+5", "²".encode()]))


@given(
    st.lists(
        st.tuples(st.sampled_from([b"x-request-id", b"Content-Length", b"transfer-encoding", b"accept"]), GARBAGE),
        max_size=6,
    )
)
def test_no_bytes_in_headers_of_a_known_caller_are_a_server_error(
    keys: KnownKeys, headers: list[tuple[bytes, bytes]]
) -> None:
    client = call(access(Inner(), keys), scope_of("/v1/x", [HOST, bearer(keys.use), *headers]))
    assert client.status in (200, 413, 431)

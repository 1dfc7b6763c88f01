"""Nothing passes the guard that should not, and what passes arrives whole; counts never leak."""

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mars_ray import errors
from mars_ray.errors import (
    ConfigError,
    MarsRayError,
    PromptTooLongError,
    QueueFullError,
    ReplicaLostError,
    StepError,
    UnavailableError,
)
from mars_ray.openai_api.api_error import MESSAGE_CHARS, ApiError, answer_to, api_error
from mars_ray.openai_api.limits import RequestLimits
from mars_ray.serve.middleware.admission import OPERATOR_REQUESTS
from mars_ray.serve.middleware.access import AccessMiddleware
from mars_ray.serve.middleware.allowed_hosts import AllowedHosts
from mars_ray.serve.middleware.keys import KeyFile, add_key
from mars_ray.serve.middleware.paths import OPEN_PATHS

HOST = (b"host", b"localhost:8000")
JSON = {b"content-type": b"application/json", b"x-content-type-options": b"nosniff", b"cache-control": b"no-store"}
OK_START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
OK_BODY = {"type": "http.response.body", "body": b"ok"}

App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass
class Told:
    """What keys the tests know, and a file that holds them."""

    file: KeyFile
    use: str
    operate: str
    other: str


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    names = [add_key(path, "ada", "use"), add_key(path, "root", "operate"), add_key(path, "bob", "use")]
    return Told(KeyFile(path, lambda: 0.0), *names)


@dataclass
class Inner:
    """The app behind the guard: remembers what reached it, and then does `then`."""

    then: App | None = None
    scopes: list[Any] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        message = await receive()
        assert (message["type"], message["more_body"]) == ("http.request", False)
        self.bodies.append(message["body"])
        if self.then:
            await self.then(scope, receive, send)
        else:
            await send(OK_START)
            await send(OK_BODY)


@dataclass
class Client:
    """Sends messages, then nothing more; keeps what comes back."""

    messages: list[dict[str, Any]]
    received: list[Any] = field(default_factory=list)
    reads: int = 0

    async def receive(self) -> dict[str, Any]:
        self.reads += 1
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def send(self, message: Any) -> None:
        self.received.append(message)

    @property
    def status(self) -> int:
        return self.received[0]["status"]  # type: ignore[no-any-return]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.received[0]["headers"])

    @property
    def error(self) -> dict[str, str | None]:
        assert JSON.items() <= self.headers.items()
        body = b"".join(message["body"] for message in self.received[1:])
        assert self.headers[b"content-length"] == str(len(body)).encode()
        told = json.loads(body)
        assert told.keys() == {"error"}
        assert told["error"].keys() == {"message", "type", "param", "code"}
        return told["error"]  # type: ignore[no-any-return]


def scope_of(path: str, headers: Sequence[tuple[bytes, bytes]] = (), **more: Any) -> dict[str, Any]:
    """As a server builds it from the path on the request line."""
    scope = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": list(headers),
    }
    return scope | more


def bearer(key: str) -> tuple[bytes, bytes]:
    return (b"authorization", b"Bearer " + key.encode())


def guard(inner: Any, told: Told | None = None, retry_after_s: int = 1, **limits: Any) -> AccessMiddleware:
    return AccessMiddleware(
        inner,
        keys=told.file if told else None,
        limits=RequestLimits(**limits),
        allowed_hosts=frozenset({"localhost"}),
        retry_after_s=lambda: retry_after_s,
        observe=lambda exchange: None,
        new_id=lambda: "made-here",
    )


def call(app: AccessMiddleware, scope: dict[str, Any], *parts: bytes | None) -> Client:
    """Make one request; None among the parts of the body is a client that leaves. Ends within a minute or fails."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        if part is not None
        else {"type": "http.disconnect"}
        for number, part in enumerate(parts or (b"",))
    ]
    client = Client(messages)
    asyncio.run(asyncio.wait_for(app(scope, client.receive, client.send), 60))
    return client


# --- request id ---


def test_a_sane_request_id_is_kept_and_reaches_app_and_caller(told: Told) -> None:
    inner = Inner()
    client = call(guard(inner, told), scope_of("/v1/x", [HOST, bearer(told.use), (b"x-request-id", b"a.B_9-")]))
    assert client.headers[b"x-request-id"] == b"a.B_9-"
    seen = Exchange.of(inner.scopes[0])
    assert (seen.request_id, seen.key) == ("a.B_9-", "ada")


@pytest.mark.parametrize(
    "sent", [[], [b""], [b"a b"], [b"a\nb"], [b"a\n"], [b"x" * 129], [b"\xff"], ["é".encode()], [b"a", b"b"]]
)
def test_any_other_request_id_is_replaced(sent: list[bytes]) -> None:
    inner = Inner()
    client = call(guard(inner), scope_of("/v1/x", [HOST, *((b"x-request-id", each) for each in sent)]))
    assert client.headers[b"x-request-id"] == b"made-here"
    assert Exchange.of(inner.scopes[0]).request_id == "made-here"


def test_state_of_the_server_is_kept_and_not_written_to(told: Told) -> None:
    shared = {"engine": 1, "exchange": "forged"}
    inner = Inner()
    call(guard(inner, told), scope_of("/v1/x", [HOST, bearer(told.use)], state=shared))
    call(guard(inner, told), scope_of("/healthz", [HOST], state=shared))
    assert [scope["state"]["engine"] for scope in inner.scopes] == [1, 1]
    assert [Exchange.of(scope).key for scope in inner.scopes] == ["ada", None]
    assert shared == {"engine": 1, "exchange": "forged"}


def test_our_headers_replace_those_of_the_app() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Cache-Control", b"public"), (b"X-Request-Id", b"other"), (b"etag", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(OK_BODY)

    client = call(guard(Inner(answer)), scope_of("/v1/x", [HOST]))
    assert sorted(client.received[0]["headers"]) == [
        (b"cache-control", b"no-store"),
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
    client = call(guard(inner, header_bytes=200), scope_of("/v1/x") | more)
    assert (client.status, client.error["code"], inner.scopes) == (431, "headers_too_large", [])


def test_a_head_of_just_the_limit_passes() -> None:
    size = len(b"/v1/x") + len(b"host") + len(b"localhost:8000") + 4
    assert call(guard(Inner(), header_bytes=size), scope_of("/v1/x", [HOST])).status == 200
    assert call(guard(Inner(), header_bytes=size - 1), scope_of("/v1/x", [HOST])).status == 431


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
def test_an_allowed_host_that_could_never_match_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed host"):
        AllowedHosts({name})


def test_a_foreign_host_is_refused_before_the_key_is_looked_at_even_on_open_paths(told: Told) -> None:
    inner = Inner()
    for path in ("/v1/x", "/healthz"):
        client = call(guard(inner, told), scope_of(path, [(b"host", b"evil.example")]))
        assert (client.status, client.error["code"]) == (421, "unknown_host")
    assert inner.scopes == []


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
def test_every_other_spelling_of_an_open_path_needs_a_key(told: Told, path: str) -> None:
    inner = Inner()
    assert call(guard(inner, told), scope_of(path, [HOST])).status == 401
    assert inner.scopes == []


def test_open_paths_are_found_behind_the_root_path_as_the_router_does(told: Told) -> None:
    app = guard(Inner(), told)
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
def test_without_a_key_only_open_paths_reach_the_app(told: Told, path: str, root: str, method: str) -> None:
    inner = Inner()
    client = call(guard(inner, told), scope_of(path, [HOST], root_path=root, method=method))
    if inner.scopes:
        assert path.removeprefix(root) in OPEN_PATHS or path in OPEN_PATHS
    else:
        assert client.status == 401


def routed(reached: list[str]) -> Starlette:
    """A real router: a path the guard takes for another than the router does would show."""

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
def test_no_path_leads_past_key_or_role_to_a_route_that_needs_them(told: Told, path: str) -> None:
    for key, allowed in ((None, {"/healthz"}), (told.use, {"/healthz", "/v1/models", "/v1/models/{name:path}"})):
        reached: list[str] = []
        call(guard(routed(reached), told), scope_of(path, [HOST, *([bearer(key)] if key else [])]))
        assert set(reached) <= allowed


def test_a_line_feed_behind_an_operators_path_is_that_path_to_the_router_and_to_the_guard(told: Told) -> None:
    reached: list[str] = []
    app = guard(routed(reached), told)
    assert call(app, scope_of("/metrics%0a", [HOST, bearer(told.use)])).status == 403
    assert call(app, scope_of("/metrics%0a", [HOST, bearer(told.operate)])).status == 200
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
def test_a_missing_malformed_unknown_or_repeated_key_is_401(told: Told, sent: list[bytes]) -> None:
    inner = Inner()
    headers = [(b"authorization", each.replace(b"%s", told.use.encode())) for each in sent]
    client = call(guard(inner, told), scope_of("/v1/x", [HOST, *headers]))
    assert (client.status, client.headers[b"www-authenticate"], inner.scopes) == (401, b"Bearer", [])
    assert client.error["code"] == "invalid_api_key"
    assert client.error["type"] == "authentication_error"
    assert "mars-" not in str(client.error)


def test_only_the_authorization_header_carries_a_key(told: Told) -> None:
    elsewhere = [(b"x-api-key", told.use.encode()), (b"api-key", told.use.encode()), (b"cookie", told.use.encode())]
    scope = scope_of("/v1/x", [HOST, *elsewhere], query_string=b"api_key=" + told.use.encode())
    assert call(guard(Inner(), told), scope).status == 401


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER   "])
def test_the_scheme_is_read_in_any_case_as_its_standard_says(told: Told, scheme: bytes) -> None:
    headers = [HOST, (b"Authorization", scheme + told.use.encode())]
    assert call(guard(Inner(), told), scope_of("/v1/x", headers)).status == 200


def test_a_key_of_the_role_use_may_not_operate(told: Told) -> None:
    inner = Inner()
    app = guard(inner, told)
    refused = call(app, scope_of("/metrics", [HOST, bearer(told.use)]))
    assert (refused.status, refused.error["type"], inner.scopes) == (403, "permission_error", [])
    assert call(app, scope_of("/metrics", [HOST, bearer(told.operate)])).status == 200
    assert call(app, scope_of("/v1/x", [HOST, bearer(told.operate)])).status == 200


def test_without_a_key_file_everybody_is_anonymous_and_may_operate() -> None:
    inner = Inner()
    assert call(guard(inner), scope_of("/metrics", [HOST])).status == 200
    assert Exchange.of(inner.scopes[0]).key == "anonymous"


def test_a_revoked_key_stops_working_while_the_guard_runs(tmp_path: Path) -> None:
    path, now = tmp_path / "keys.yaml", [0.0]
    ada = add_key(path, "ada", "operate")
    app = guard(Inner(), Told(KeyFile(path, lambda: now[0]), ada, ada, ada))
    assert call(app, scope_of("/v1/x", [HOST, bearer(ada)])).status == 200
    path.write_text("[]")
    now[0] += 1
    assert call(app, scope_of("/v1/x", [HOST, bearer(ada)])).status == 401


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=8), st.booleans())
def test_no_bytes_in_headers_crash_the_guard_or_let_a_stranger_in(
    told: Told, headers: list[tuple[bytes, bytes]], hosted: bool
) -> None:
    inner = Inner()
    client = call(guard(inner, told), scope_of("/v1/x", [*headers, *([HOST] if hosted else [])]))
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
    told: Told, headers: list[tuple[bytes, bytes]]
) -> None:
    client = call(guard(Inner(), told), scope_of("/v1/x", [HOST, bearer(told.use), *headers]))
    assert client.status in (200, 413, 431)


# --- how many at a time ---


class Held:
    """Requests that stay inside until they are told how to end."""

    def __init__(self, told: Told | None, **limits: Any) -> None:
        self.app = guard(self.inside, told, retry_after_s=7, **limits)
        self.endings: list[asyncio.Future[str]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def inside(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        ending = asyncio.get_running_loop().create_future()
        self.endings.append(ending)
        how = await ending
        if how == "fail":
            raise RuntimeError("broken")
        await send(OK_START)
        if how == "fail late":
            raise RuntimeError("broken late")
        if how == "disconnect":
            assert (await receive())["type"] == "http.disconnect"
            return
        await send(OK_BODY)

    async def begin(self, key: str, *, path: str = "/v1/x", refused: bool = False) -> Client:
        client = Client([{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}])
        before = len(self.endings)
        task = asyncio.create_task(self.app(scope_of(path, [HOST, bearer(key)]), client.receive, client.send))
        while not task.done() and len(self.endings) == before:
            await asyncio.sleep(0)
        assert task.done() == refused
        if not refused:
            self.tasks.append(task)
        return client

    async def end(self, number: int, how: str) -> None:
        task, ending = self.tasks.pop(number), self.endings.pop(number)
        if how == "cancel":
            task.cancel()
        else:
            ending.set_result(how)
        with suppress(asyncio.CancelledError, RuntimeError):
            await task


def test_requests_of_a_key_and_of_all_keys_are_limited_apart(told: Told) -> None:
    async def test() -> None:
        inside = Held(told, requests_per_key=2, requests=3)
        await inside.begin(told.use)
        await inside.begin(told.use)
        one_too_many = await inside.begin(told.use, refused=True)
        await inside.begin(told.other)
        full = await inside.begin(told.operate, refused=True)
        for client, code in ((one_too_many, "rate_limit_exceeded"), (full, "overloaded")):
            assert (client.status, client.headers[b"retry-after"], client.reads) == (429, b"7", 0)
            assert (client.error["type"], client.error["code"]) == ("rate_limit_error", code)
        assert inside.app.admission.in_flight == {"ada": 2, "bob": 1}
        while inside.tasks:
            await inside.end(0, "cancel")

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("with_keys", [True, False])
def test_operators_have_room_of_their_own_however_many_callers_there_are(told: Told, with_keys: bool) -> None:
    async def test() -> None:
        inside = Held(told if with_keys else None, requests_per_key=2, requests=2)
        for _ in range(2):
            await inside.begin(told.operate)
        await inside.begin(told.operate, refused=True)
        for _ in range(OPERATOR_REQUESTS):
            await inside.begin(told.operate, path="/control")
        one_too_many = await inside.begin(told.operate, path="/metrics", refused=True)
        assert (one_too_many.status, one_too_many.headers[b"retry-after"]) == (429, b"7")
        assert list(inside.app.admission.in_flight.values()) == [2 + OPERATOR_REQUESTS]
        while inside.tasks:
            await inside.end(0, "finish")
        assert inside.app.admission.in_flight == {}

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_refusal_speaks_of_a_key_only_where_there_are_keys(told: Told) -> None:
    async def test() -> None:
        for keys, said in ((told, "This key has 1 requests"), (None, "Callers without a key have 1 requests")):
            inside = Held(keys, requests_per_key=1)
            await inside.begin(told.use)
            refused = await inside.begin(told.use, refused=True)
            assert str(refused.error["message"]).startswith(said)
            await inside.end(0, "finish")

    asyncio.run(asyncio.wait_for(test(), 60))


def test_open_paths_are_not_counted_and_never_refused_for_load(told: Told) -> None:
    async def test() -> None:
        app = guard(Inner(hold), told, requests=1, requests_per_key=1)
        busy, health = Client([{"type": "http.request"}]), Client([{"type": "http.request"}])
        task = asyncio.create_task(app(scope_of("/v1/x", [HOST, bearer(told.use)]), busy.receive, busy.send))
        await entered.wait()
        assert app.admission.in_flight == {"ada": 1}
        await app(scope_of("/healthz", [HOST]), health.receive, health.send)
        assert health.status == 200
        assert app.admission.in_flight == {"ada": 1}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    entered = asyncio.Event()

    async def hold(scope: Any, receive: Any, send: Any) -> None:
        await send(OK_START)
        await send(OK_BODY)
        if scope["path"] != "/healthz":
            entered.set()
            await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(test(), 60))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), st.integers(0, 2)),
            st.tuples(st.sampled_from(["finish", "fail", "fail late", "cancel", "disconnect"]), st.integers(0, 9)),
        ),
        max_size=30,
    )
)
def test_places_are_given_back_however_requests_end(told: Told, actions: list[tuple[str, int]]) -> None:
    keys = {"ada": told.use, "root": told.operate, "bob": told.other}

    async def test() -> None:
        inside, expected = Held(told, requests_per_key=2, requests=4), list[str]()
        for action, number in actions:
            if action == "begin":
                name = list(keys)[number]
                full = expected.count(name) == 2 or len(expected) == 4
                await inside.begin(keys[name], refused=full)
                expected += [] if full else [name]
            elif expected:
                await inside.end(number % len(expected), action)
                expected.pop(number % len(expected))
            assert inside.app.admission.in_flight == {name: expected.count(name) for name in set(expected)}
        while inside.tasks:
            await inside.end(0, "finish")
        assert inside.app.admission.in_flight == {}

    logging.disable()
    try:
        asyncio.run(asyncio.wait_for(test(), 60))
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("parts", [(b"x" * 11,), (b"x", None)])
def test_a_request_whose_body_never_gets_in_gives_its_place_back(told: Told, parts: tuple[bytes | None, ...]) -> None:
    app = guard(Inner(), told, body_bytes=10)
    call(app, scope_of("/v1/x", [HOST, bearer(told.use)]), *parts)
    assert app.admission.in_flight == {}


# --- bodies ---


def test_the_app_gets_the_whole_body_as_one_message_and_then_hears_that_the_client_left() -> None:
    heard: list[Any] = []

    async def listen(scope: Any, receive: Any, send: Any) -> None:
        heard.append(await receive())

    inner = Inner(listen)
    call(guard(inner), scope_of("/v1/x", [HOST]), b"one ", b"", b"two", None)
    assert heard == []  # the None above is what ended the body
    client = Client(
        [
            {"type": "http.request", "body": b"one ", "more_body": True},
            {"type": "http.request", "more_body": True},
            {"type": "http.request", "body": b"two"},
            {"type": "http.disconnect"},
        ]
    )
    asyncio.run(guard(inner)(scope_of("/v1/x", [HOST]), client.receive, client.send))
    assert inner.bodies == [b"one two"]
    assert heard == [{"type": "http.disconnect"}]


def test_a_length_beyond_the_limit_is_refused_unread() -> None:
    for length in (b"11", b"9" * 5000):
        inner = Inner()
        client = call(guard(inner, body_bytes=10), scope_of("/v1/x", [HOST, (b"content-length", length)]), b"x" * 11)
        assert (client.status, client.error["code"], client.reads, inner.scopes) == (413, "body_too_large", 0, [])


def test_a_body_that_lies_about_its_length_is_counted_while_it_is_read() -> None:
    inner = Inner()
    headers = [HOST, (b"content-length", b"1")]
    client = call(guard(inner, body_bytes=10), scope_of("/v1/x", headers), b"x" * 6, b"x" * 6, b"never read")
    assert (client.status, client.reads, inner.scopes) == (413, 2, [])


def test_a_body_of_just_the_limit_passes() -> None:
    inner = Inner()
    assert call(guard(inner, body_bytes=10), scope_of("/v1/x", [HOST]), b"x" * 4, b"x" * 6).status == 200
    assert inner.bodies == [b"x" * 10]


def test_a_body_that_does_not_end_is_408_and_the_connection_is_closed() -> None:
    inner = Inner()
    client = Client([{"type": "http.request", "body": b"x", "more_body": True}])
    app = guard(inner, body_seconds=0.001)
    asyncio.run(app(scope_of("/v1/x", [HOST]), client.receive, client.send))
    assert (client.status, client.error["code"], client.headers[b"connection"]) == (408, "body_timeout", b"close")
    assert inner.scopes == []


def test_a_client_that_leaves_before_its_body_is_whole_starts_nothing() -> None:
    inner = Inner()
    client = call(guard(inner), scope_of("/v1/x", [HOST]), b"x", None)
    assert (client.received, inner.scopes) == ([], [])


def test_open_paths_take_no_body() -> None:
    inner = Inner()
    assert call(guard(inner), scope_of("/healthz", [HOST]), b"x").status == 413
    assert call(guard(inner), scope_of("/healthz", [HOST, (b"content-length", b"1")]), b"x").status == 413
    assert call(guard(inner), scope_of("/healthz", [HOST, (b"content-length", b"0")])).status == 200


# --- failures inside ---


def raising(error: Exception, *, begun: bool = False) -> Inner:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send(OK_START)
        raise error

    return Inner(fail)


def test_an_unforeseen_exception_is_an_internal_error_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    client = call(guard(raising(RuntimeError("/home/secret"))), scope_of("/v1/x", [HOST]))
    assert (client.status, client.error["type"]) == (500, "server_error")
    assert client.error["message"] == "internal error, request id made-here."
    assert "/home/secret" not in str(client.received)
    assert "made-here" in caplog.text
    assert "Traceback" in caplog.text


def test_an_exception_after_the_response_began_is_logged_and_breaks_it_off(caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("late")
    client = Client([{"type": "http.request", "body": b""}])
    with pytest.raises(RuntimeError) as caught:
        asyncio.run(guard(raising(error, begun=True))(scope_of("/v1/x", [HOST]), client.receive, client.send))
    assert caught.value is error
    assert len(client.received) == 1
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "code", "shown"),
    [
        (ApiError(404, "no such model", type="not_found_error", code="model_not_found"), 404, "model_not_found", True),
        (PromptTooLongError("too long"), 400, "context_length_exceeded", True),
        (QueueFullError("full"), 429, "overloaded", True),
        (UnavailableError("none is up"), 503, "unavailable", True),
        (ReplicaLostError("it died"), 503, "replica_lost", True),
        (StepError("decoding failed: RuntimeError('/x')."), 500, "step_failed", False),
        (ConfigError("/etc/x"), 500, "internal_error", False),
    ],
)
def test_errors_of_the_house_are_answered_as_the_table_says(
    error: Exception, status: int, code: str, shown: bool
) -> None:
    client = call(guard(raising(error), retry_after_s=3), scope_of("/v1/x", [HOST]))
    assert (client.status, client.error["code"]) == (status, code)
    assert (client.error["message"] == str(error)) == shown
    assert client.headers.get(b"retry-after") == (b"3" if status in (429, 503) else None)


# --- errors ---

FAMILIES = {errors.MarsRayError, errors.InputError, errors.RunError}
"""Raised by nobody; were they in the table, a new class under them would find an answer nobody chose."""


def all_errors(base: type[MarsRayError] = MarsRayError) -> Iterator[type[MarsRayError]]:
    yield base
    for each in base.__subclasses__():
        yield from all_errors(each)


def test_every_error_of_the_tree_has_a_status() -> None:
    ours = {each for each in all_errors() if each.__module__ == errors.__name__}
    assert len(ours) == sum(issubclass(each, MarsRayError) for _, each in inspect.getmembers(errors, inspect.isclass))
    assert {each.__name__ for each in ours - FAMILIES if answer_to(each) is None} == set()


def test_the_status_is_that_of_the_nearest_base() -> None:
    assert api_error(errors.BadRecordError("x")).status == 500
    assert api_error(PromptTooLongError("x")).code == "context_length_exceeded"
    assert api_error(MarsRayError("/secret")).message == "internal error, the request id is in the header x-request-id."


def test_an_error_quotes_no_more_of_a_request_than_helps() -> None:
    assert len(api_error(errors.RequestError("x" * 10_000)).message) == MESSAGE_CHARS


def test_the_body_of_an_error_is_openais() -> None:
    error = ApiError.bad_request("n is 9", "n", "too_many")
    assert error.status == 400
    assert error.body() == {
        "error": {"message": "n is 9", "type": "invalid_request_error", "param": "n", "code": "too_many"}
    }


# --- the rest ---


def test_a_websocket_is_closed_before_it_is_accepted(told: Told) -> None:
    inner, client = Inner(), Client([{"type": "websocket.connect"}])
    scope = scope_of("/healthz", [HOST]) | {"type": "websocket"}
    asyncio.run(guard(inner, told)(scope, client.receive, client.send))
    assert (client.received, inner.scopes) == ([{"type": "websocket.close", "code": 1008}], [])


def test_lifespan_passes_and_unknown_scopes_do_not() -> None:
    passed: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    client = Client([])
    asyncio.run(guard(inner)({"type": "lifespan"}, client.receive, client.send))
    with pytest.raises(ValueError, match="'mqtt'"):
        asyncio.run(guard(inner)({"type": "mqtt"}, client.receive, client.send))
    assert passed == ["lifespan"]


@pytest.mark.parametrize("wrong", [{"bodybytes": 1}, {"body_bytes": 0}, {"body_seconds": 0}, {"prompt_tokens": 0}])
def test_unknown_and_impossible_limits_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        RequestLimits(**wrong)

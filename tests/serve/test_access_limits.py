"""Requests in flight and bodies are limited, and counts never leak."""

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.serve.middleware import body as body_reader
from mars_ray.serve.middleware.admission import OPERATOR_REQUESTS, PAGE_REQUESTS
from tests.serve.access_samples import (
    HOST,
    OK_BODY,
    OK_START,
    Client,
    Inner,
    KnownKeys,
    access,
    bearer,
    call,
    scope_of,
    serving,
)

# --- how many at a time ---


class Held:
    """Requests that stay inside until they are told how to end."""

    def __init__(self, keys: KnownKeys | None, **limits: Any) -> None:
        self.app = access(self.inside, keys, retry_after_s=7, **limits)
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


def test_requests_of_a_key_and_of_all_keys_are_limited_apart(keys: KnownKeys) -> None:
    async def test() -> None:
        inside = Held(keys, requests_per_key=2, requests=3)
        await inside.begin(keys.use)
        await inside.begin(keys.use)
        one_too_many = await inside.begin(keys.use, refused=True)
        await inside.begin(keys.other)
        full = await inside.begin(keys.operate, refused=True)
        for client, code in ((one_too_many, "rate_limit_exceeded"), (full, "overloaded")):
            assert (client.status, client.headers[b"retry-after"], client.reads) == (429, b"7", 0)
            assert (client.error["type"], client.error["code"]) == ("rate_limit_error", code)
        assert inside.app.admission.in_flight == {"ada": 2, "bob": 1}
        while inside.tasks:
            await inside.end(0, "cancel")

    asyncio.run(asyncio.wait_for(test(), 60))


def test_requests_that_only_tokenise_have_a_limit_of_their_own_per_key(keys: KnownKeys) -> None:
    async def test() -> None:
        inside = Held(keys, requests_per_key=9, requests=9, tokenize_per_key=2)
        await inside.begin(keys.use, path="/tokenize")
        await inside.begin(keys.use, path="/detokenize")
        one_too_many = await inside.begin(keys.use, path="/tokenize", refused=True)
        assert (one_too_many.status, one_too_many.error["code"]) == (429, "rate_limit_exceeded")
        await inside.begin(keys.use)
        await inside.begin(keys.other, path="/tokenize")
        await inside.end(0, "cancel")
        await inside.begin(keys.use, path="/tokenize")
        while inside.tasks:
            await inside.end(0, "cancel")

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("with_keys", [True, False])
def test_operators_have_room_of_their_own_however_many_callers_there_are(keys: KnownKeys, with_keys: bool) -> None:
    async def test() -> None:
        inside = Held(keys if with_keys else None, requests_per_key=2, requests=2)
        for _ in range(2):
            await inside.begin(keys.operate)
        await inside.begin(keys.operate, refused=True)
        for _ in range(OPERATOR_REQUESTS):
            await inside.begin(keys.operate, path="/control")
        one_too_many = await inside.begin(keys.operate, path="/metrics", refused=True)
        assert (one_too_many.status, one_too_many.headers[b"retry-after"]) == (429, b"7")
        assert list(inside.app.admission.in_flight.values()) == [2 + OPERATOR_REQUESTS]
        while inside.tasks:
            await inside.end(0, "finish")
        assert inside.app.admission.in_flight == {}

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_refusal_speaks_of_a_key_only_where_there_are_keys(keys: KnownKeys) -> None:
    async def test() -> None:
        for known, said in (
            (keys, "This key has 1 requests"),
            (None, "Callers without a key together have 1 requests"),
        ):
            inside = Held(known, requests_per_key=1)
            await inside.begin(keys.use)
            refused = await inside.begin(keys.use, refused=True)
            assert str(refused.error["message"]).startswith(said)
            await inside.end(0, "finish")

    asyncio.run(asyncio.wait_for(test(), 60))


def test_open_paths_are_not_counted_and_never_refused_for_load(keys: KnownKeys) -> None:
    async def test() -> None:
        held = Held(keys, requests=1, requests_per_key=1)
        await held.begin(keys.use)
        probe = await held.begin("none", path="/healthz")
        assert held.app.admission.in_flight == {"ada": 1}
        while held.tasks:
            await held.end(0, "finish")
        assert probe.status == 200

    asyncio.run(asyncio.wait_for(test(), 60))


def test_pages_have_places_of_their_own_and_probes_need_none(keys: KnownKeys) -> None:
    async def test() -> None:
        held = Held(keys, pages=frozenset({"/", "/cluster"}))
        for _ in range(PAGE_REQUESTS):
            await held.begin("none", path="/")
        refused = await held.begin("none", path="/cluster", refused=True)
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        await held.begin("none", path="/healthz")
        await held.begin(keys.use)
        await held.end(0, "finish")
        await held.begin("none", path="/cluster")
        while held.tasks:
            await held.end(0, "finish")

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
def test_places_are_given_back_however_requests_end(keys: KnownKeys, actions: list[tuple[str, int]]) -> None:
    by_name = {"ada": keys.use, "root": keys.operate, "bob": keys.other}

    async def test() -> None:
        inside, expected = Held(keys, requests_per_key=2, requests=4), list[str]()
        for action, number in actions:
            if action == "begin":
                name = list(by_name)[number]
                full = expected.count(name) == 2 or len(expected) == 4
                await inside.begin(by_name[name], refused=full)
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
def test_a_request_whose_body_never_gets_in_gives_its_place_back(
    keys: KnownKeys, monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes | None, ...]
) -> None:
    monkeypatch.setattr(body_reader, "DRAIN_SECONDS", 0.01)
    app = access(Inner(), keys, body_bytes=10)
    call(app, scope_of("/v1/x", [HOST, bearer(keys.use)]), *parts)
    assert app.admission.in_flight == {}


# --- bodies ---


def test_the_app_gets_the_whole_body_as_one_message_and_then_hears_that_the_client_left() -> None:
    heard: list[Any] = []

    async def listen(scope: Any, receive: Any, send: Any) -> None:
        heard.append(await receive())

    inner = Inner(listen)
    call(access(inner), scope_of("/v1/x", [HOST]), b"one ", b"", b"two", None)
    assert heard == []  # the None above is what ended the body
    client = Client(
        [
            {"type": "http.request", "body": b"one ", "more_body": True},
            {"type": "http.request", "more_body": True},
            {"type": "http.request", "body": b"two"},
            {"type": "http.disconnect"},
        ]
    )
    asyncio.run(access(inner)(scope_of("/v1/x", [HOST]), client.receive, client.send))
    assert inner.bodies == [b"one two"]
    assert heard == [{"type": "http.disconnect"}]


def test_a_length_beyond_the_limit_is_refused_unread() -> None:
    for length in (b"11", b"9" * 5000):
        inner = Inner()
        client = call(access(inner, body_bytes=10), scope_of("/v1/x", [HOST, (b"content-length", length)]), b"x" * 11)
        assert (client.status, client.error["code"], inner.scopes) == (413, "body_too_large", [])
        assert client.reads_before_answer == 0


def test_a_body_that_lies_about_its_length_is_counted_while_it_is_read() -> None:
    inner = Inner()
    headers = [HOST, (b"content-length", b"1")]
    client = call(access(inner, body_bytes=10), scope_of("/v1/x", headers), b"x" * 6, b"x" * 6, b"never read")
    assert (client.status, client.reads_before_answer, inner.scopes) == (413, 2, [])


def test_a_body_of_just_the_limit_passes() -> None:
    inner = Inner()
    assert call(access(inner, body_bytes=10), scope_of("/v1/x", [HOST]), b"x" * 4, b"x" * 6).status == 200
    assert inner.bodies == [b"x" * 10]


def test_a_body_that_does_not_end_is_408_and_the_connection_is_closed() -> None:
    inner = Inner()
    client = Client([{"type": "http.request", "body": b"x", "more_body": True}])
    app = access(inner, body_seconds=0.001)
    asyncio.run(app(scope_of("/v1/x", [HOST]), client.receive, client.send))
    assert (client.status, client.error["code"], client.headers[b"connection"]) == (408, "body_timeout", b"close")
    assert inner.scopes == []


def test_a_client_that_leaves_before_its_body_is_whole_starts_nothing() -> None:
    inner = Inner()
    client = call(access(inner), scope_of("/v1/x", [HOST]), b"x", None)
    assert (client.received, inner.scopes) == ([], [])


def test_open_paths_take_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "DRAIN_SECONDS", 0.01)
    inner = Inner()
    assert call(access(inner), scope_of("/healthz", [HOST]), b"x").status == 413
    assert call(access(inner), scope_of("/healthz", [HOST, (b"content-length", b"1")]), b"x").status == 413
    assert call(access(inner), scope_of("/healthz", [HOST, (b"content-length", b"0")])).status == 200


@pytest.mark.parametrize("announced", [(b"content-length", b"100000"), (b"transfer-encoding", b"chunked")])
@pytest.mark.parametrize(("path", "status"), [("/v1/x", 401), ("/healthz", 413)])
def test_a_refusal_ends_the_connection_of_a_body_that_was_not_read(
    keys: KnownKeys, path: str, status: int, announced: tuple[bytes, bytes]
) -> None:
    client = call(access(Inner(), keys), scope_of(path, [HOST, announced]), b"x", b"the rest trickles in")
    assert (client.status, client.headers.get(b"connection")) == (status, b"close")


@pytest.mark.parametrize(("path", "status"), [("/v1/x", 401), ("/healthz", 413)])
def test_a_client_that_is_refused_early_may_send_all_of_its_body(keys: KnownKeys, path: str, status: int) -> None:
    """Else the connection is reset in the middle of the body, and the answer may be lost."""
    body = b"x" * 5_000_000

    def exchange(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"POST %s HTTP/1.1\r\nhost: localhost\r\n" % path.encode())
            client.sendall(b"content-length: %d\r\n\r\n" % len(body))
            client.sendall(body)
            return b"".join(iter(lambda: client.recv(65536), b""))

    async def test() -> bytes:
        async with serving(access(Inner(), keys)) as port:
            return await asyncio.to_thread(exchange, port)

    assert asyncio.run(test()).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("body_bytes", [100, 10**9], ids=["too slow", "too long"])
def test_the_rest_of_a_refused_body_is_read_for_a_bounded_time_and_length(
    keys: KnownKeys, monkeypatch: pytest.MonkeyPatch, body_bytes: int
) -> None:
    monkeypatch.setattr(body_reader, "DRAIN_BYTES", 10)
    monkeypatch.setattr(body_reader, "DRAIN_SECONDS", 0.01)
    parts = [{"type": "http.request", "body": b"x" * 4, "more_body": True}] * min(9, body_bytes // 50)
    client = Client(list(parts))
    headers = [HOST, (b"content-length", str(body_bytes).encode())]
    asyncio.run(asyncio.wait_for(access(Inner(), keys)(scope_of("/v1/x", headers), client.receive, client.send), 60))
    assert client.status == 401
    assert client.reads == 3


def test_a_refusal_keeps_the_connection_where_no_body_follows(keys: KnownKeys) -> None:
    client = call(access(Inner(), keys), scope_of("/v1/x", [HOST, (b"content-length", b"0")]))
    assert (client.status, client.headers.get(b"connection")) == (401, None)


def test_an_answer_to_a_body_that_was_read_keeps_the_connection(keys: KnownKeys) -> None:
    headers = [HOST, bearer(keys.use), (b"content-length", b"1")]
    client = call(access(Inner(), keys), scope_of("/v1/x", headers), b"x")
    assert (client.status, client.headers.get(b"connection")) == (200, None)

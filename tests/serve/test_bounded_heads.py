"""The HTTP server of a gateway on its own port: heads have an end, whoever sends them."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from uvicorn.protocols.http import auto

from mars_ray.serve.http import bounded_heads
from mars_ray.serve.http.bounded_heads import BoundedHeadProtocol, bound_heads
from tests.serve.access_samples import OK_BODY, OK_START, serving
from tests.serve.haproxy_samples import connected, within

MOST = 1000
START = b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send(OK_START)
    await send(OK_BODY)


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHeadProtocol, "most_bytes", 0)
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)
    bound_heads(MOST)


def test_a_head_without_end_is_refused_before_it_fills_memory() -> None:
    async def test() -> None:
        async with serving(answer) as port, connected(port) as (reader, writer):
            writer.write(START)
            with suppress(ConnectionError):  # it is cut off, perhaps before it has read why
                while not reader.at_eof():
                    writer.write(b"a: " + b"x" * 100 + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0)
                assert (await reader.read()).startswith(b"HTTP/1.1 431 ")

    within(test())


@pytest.mark.parametrize("sent", [b"", START], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(bounded_heads, "HEAD_SECONDS", 0.2)

    async def test() -> None:
        async with serving(answer) as port, connected(port) as (reader, writer):
            writer.write(sent)
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")

    within(test())


def test_the_next_head_on_a_connection_has_an_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_heads, "HEAD_SECONDS", 0.5)

    async def test() -> None:
        async with serving(answer) as port, connected(port) as (reader, writer):
            writer.write(START + b"content-length: 2\r\n\r\nok" + START)
            said = await reader.read()
            assert said.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in said

    within(test())


def test_bodies_are_not_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_heads, "HEAD_SECONDS", 0.2)

    async def test() -> None:
        async with serving(answer) as port, connected(port) as (reader, writer):
            for _ in range(2):
                writer.write(START + b"content-length: 5000\r\n\r\n" + b"x" * 4000)
                await asyncio.sleep(0.4)  # longer than a head may take
                writer.write(b"x" * 1000)
                assert (await reader.readuntil(b"ok\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")

    within(test())

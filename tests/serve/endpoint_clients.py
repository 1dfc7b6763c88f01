"""Ways to talk to a running endpoint that no well-behaved client has, and to wait until it is done with all of them."""

import asyncio
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx2

from tests.serve.endpoint_samples import Served

MODEL = "bundled"
PATIENCE_S = 60.0
"""A bound for what must happen soon; no test asserts how soon."""


def settled(endpoint: Served) -> None:
    """Wait until nothing is in flight and every exchange was observed."""
    until_s = time.monotonic() + PATIENCE_S
    while (left := endpoint.in_flight()) != (0, 0, 0):
        assert time.monotonic() < until_s, f"{left} running, waiting and in the gateway are left"
    endpoint.run(asyncio.sleep(0))


def no_longer_asked(endpoint: Served) -> None:
    """Wait until the gateway has no request, whatever the engine does."""
    until_s = time.monotonic() + PATIENCE_S
    while left := sum(endpoint.gateway.admission.in_flight.values()):
        assert time.monotonic() < until_s, f"{left} are left in the gateway"


def until_running(endpoint: Served, sequences: int) -> None:
    """Wait until so many sequences have a row."""
    until_s = time.monotonic() + PATIENCE_S
    while (seen := endpoint.in_flight())[0] < sequences:
        assert time.monotonic() < until_s, f"only {seen} are in flight"


def head_of(endpoint: Served, path: str, length: int, more: str = "") -> bytes:
    """The head of a POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n{more}\r\n".encode()


def connected(endpoint: Served, *, receive_bytes: int | None = None) -> socket.socket:
    """A TCP connection, with a small receive buffer if asked for."""
    raw = socket.socket()
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(PATIENCE_S)
    url = urlsplit(endpoint.url)
    raw.connect((url.hostname, url.port))
    return raw


def sent(endpoint: Served, body: dict[str, Any], *, receive_bytes: int | None = None) -> socket.socket:
    """A connection on which a completion was asked for and nothing was read."""
    raw, content = connected(endpoint, receive_bytes=receive_bytes), json.dumps({"model": MODEL} | body).encode()
    raw.sendall(head_of(endpoint, "/v1/completions", len(content)) + content)
    return raw


def read_until(raw: socket.socket, mark: bytes) -> bytes:
    """Read until `mark` came."""
    seen = b""
    while mark not in seen:
        part = raw.recv(4096)
        assert part, f"the connection ended after {seen!r}"
        seen += part
    return seen


def http(endpoint: Served, key: str | None = None) -> httpx2.Client:
    """A plain HTTP client, with an API key if there is one."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=endpoint.url, timeout=PATIENCE_S, headers=headers)


def check_anthropic_error(response: httpx2.Response, status: int) -> str:
    """Assert that a response is an error of Anthropic's form; return its message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return str(body["error"]["message"])


def check_error(response: httpx2.Response, status: int, *, param: str | None = None, code: str | None = None) -> str:
    """Assert that a response is an error of OpenAI's form with these fields; return its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    message = error["message"]
    assert isinstance(message, str)
    return message

"""Requests as an attacker may send them, and answers that must tell nothing of the inside."""

import json
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import mars_ray
from tests.serve.endpoint_samples import FOLDER, MESSAGES, Served

ROOT = Path(mars_ray.__file__).parent

LEAKS = (str(ROOT), str(FOLDER), str(Path.home()), "site-packages", "Traceback", ".py", " object at 0x", "<class")
"""What only the operator may know."""

CHAT = {"model": "bundled", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "bundled", "prompt": "a", "max_tokens": 4},
    "/tokenize": {"model": "bundled", "messages": MESSAGES},
    "/detokenize": {"model": "bundled", "tokens": [1]},
}
GENERATING = ("/v1/chat/completions", "/v1/completions")


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which tells nothing about the inside."""
        told: dict[str, Any] = self.json["error"]
        assert told.keys() == {"message", "type", "param", "code"}
        assert not [leak for leak in LEAKS if leak in self.body.decode()]
        return told

    @property
    def text(self) -> str:
        return str(self.json["choices"][0]["message"]["content"])


def connection_to(endpoint: Served) -> HTTPConnection:
    host, port = endpoint.url.removeprefix("http://").split(":")
    return HTTPConnection(host, int(port), timeout=60)


def call(
    endpoint: Served, path: str, body: Any = None, *, key: str | None = None, method: str | None = None, **headers: str
) -> Answer:
    """Send one request; a body that is not bytes is JSON."""
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    given = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        given["authorization"] = f"Bearer {key}"
    with closing(connection_to(endpoint)) as connection:
        connection.request(method or ("GET" if content is None else "POST"), path, content, given)
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())

"""The `openai` client against a real endpoint with keys: what it is refused, and how it comes back."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.serve.endpoint_clients import MODEL, connected, head_of, http, settled
from tests.serve.endpoint_samples import MESSAGES, Served, config_of, served
from tests.serve.key_samples import add_key


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    return {"path": str(path), "use": add_key(path, "ada", "use"), "operate": add_key(path, "root", "operate")}


@pytest.fixture(scope="module")
def guarded(keys: dict[str, str]) -> Iterator[Served]:
    """An endpoint with keys, each of which may have one request in flight; `web: false` leaves its pages out."""
    with served(config_of(keys=keys["path"], limits={"requests_per_key": 1}, log_prompts=True, web=False)) as running:
        yield running


def with_key(endpoint: Served, key: str, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{endpoint.url}/v1", api_key=key, **{"max_retries": 0} | options)


@pytest.mark.parametrize(
    ("path", "statuses"),
    [("/healthz", (200, 200, 200)), ("/readyz", (200, 200, 200)), ("/health", (200, 200, 200)),
     ("/ping", (200, 200, 200)), ("/version", (401, 200, 200)), ("/metrics", (401, 403, 200)),
     ("/control", (401, 403, 200)), ("/openapi.json", (401, 200, 200)), ("/v1/models", (401, 200, 200)),
     ("/", (401, 403, 404)), ("/cluster", (401, 403, 404)), ("/web/style.css", (401, 403, 404))],
)  # fmt: skip
def test_each_path_is_for_its_role(guarded: Served, keys: dict[str, str], path: str, statuses: tuple[int, ...]) -> None:
    with http(guarded) as plain:
        heads: list[dict[str, str]] = [{}, *({"authorization": f"Bearer {keys[role]}"} for role in ("use", "operate"))]
        assert tuple(plain.get(path, headers=head).status_code for head in heads) == statuses


def holding_the_only_place(endpoint: Served, key: str) -> socket.socket:
    """A request whose body does not come."""
    raw = connected(endpoint)
    raw.sendall(head_of(endpoint, "/v1/completions", 10, f"Authorization: Bearer {key}\r\nExpect: 100-continue\r\n"))
    assert raw.recv(100).startswith(b"HTTP/1.1 100"), "the server waits for the body, so the place is taken"
    return raw


def test_a_client_that_comes_back_when_told_to_is_served(guarded: Served, keys: dict[str, str]) -> None:
    held, statuses = holding_the_only_place(guarded, keys["use"]), []

    def leave(response: Any) -> None:
        statuses.append(response.status_code)
        held.close()

    hooked = openai.DefaultHttpxClient(event_hooks={"response": [leave]})
    with with_key(guarded, keys["use"], max_retries=8, http_client=hooked) as user:
        assert user.models.list().data
    assert statuses[0] == 429
    assert statuses[-1] == 200
    settled(guarded)


def test_the_log_names_the_key_and_the_prompt_if_asked_to_but_never_the_key_itself(
    guarded: Served, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mars_ray.requests")
    with with_key(guarded, keys["use"]) as user:
        user.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)  # type: ignore[arg-type]
    settled(guarded)
    [line] = [record.getMessage() for record in caplog.records if record.name == "mars_ray.requests"]
    assert json.loads(line)["key"] == "ada"
    assert json.loads(line)["prompt"] == MESSAGES
    assert keys["use"] not in caplog.text

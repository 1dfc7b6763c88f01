"""Streams over HTTP whose engine is lost in the middle: the client reads one whole answer."""

import json
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.errors import ReplicaLostError
from mars_ray.serve.replicas.engine_client import EngineClient, Take
from tests.serve.endpoint_clients import MODEL, http, settled
from tests.serve.endpoint_samples import MESSAGES, Served, config_of, served
from tests.serve.tool_samples import QUESTION, TOOLS

CHAT = {"model": MODEL, "messages": MESSAGES, "mode": "exact"}
ANSWERS: list[dict[str, Any]] = [
    CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1, "seed": 5},
    CHAT | {"stop": ["Dallas"], "stream_options": {"include_usage": True, "single_tokens": True}},
    CHAT | {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200},
]


class Unreliable:
    """Loses the engine of each stream after `lives` chunks, until `lives` is empty."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.lives: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request: Request, take: Take, *, whole: bool = False) -> None:
        life = self.lives.pop(0) if self.lives else None
        sent = 0

        async def take_some(part: Sequence[Chunk]) -> None:
            nonlocal sent
            if sent == life:
                raise ReplicaLostError("the engine stopped before the request ended.")
            sent += len(part)
            await take(part)

        await self._client.generate(request, take_some, whole=whole)


@pytest.fixture(scope="module")
def unreliable() -> Iterator[tuple[Served, Unreliable]]:
    clients: list[Unreliable] = []

    def wrap(client: EngineClient) -> EngineClient:
        clients.append(Unreliable(client))
        return clients[0]

    with served(config_of(tool_call_parser="hermes"), wrap) as running:
        yield running, clients[0]


def events(endpoint: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without what differs between two requests."""
    with http(endpoint) as client:
        lines = client.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    found = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for event in found:
        del event["id"], event["created"]
    return found


def joined(found: list[dict[str, Any]]) -> list[Any]:
    """Everything that the events say of each choice, however it was divided, and the usage."""
    said: dict[int, dict[str, Any]] = {}
    usage = [event["usage"] for event in found if event.get("usage")]
    for event in found:
        for choice in event["choices"]:
            whole = said.setdefault(choice["index"], {"content": "", "arguments": "", "names": [], "logprobs": []})
            whole["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                whole["names"] += [call["function"]["name"]] if call["function"].get("name") else []
                whole["arguments"] += call["function"].get("arguments") or ""
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                whole["logprobs"].append((entry["index"], entry["token"], round(entry["logprob"], 3)))
            whole["reason"] = choice["finish_reason"]
    return [sorted(said.items()), [(each["prompt_tokens"], each["completion_tokens"]) for each in usage]]


@pytest.mark.parametrize("body", ANSWERS)
def test_a_client_reads_the_answer_of_one_engine_from_three(
    unreliable: tuple[Served, Unreliable], body: dict[str, Any]
) -> None:
    endpoint, client = unreliable
    expected = events(endpoint, body)
    client.lives = [1, 1]
    assert joined(events(endpoint, body)) == joined(expected)
    assert not client.lives, "two engines were lost"
    settled(endpoint)


def test_the_log_and_the_metrics_count_a_stream_that_moved(
    unreliable: tuple[Served, Unreliable], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, client = unreliable

    def counted() -> float:
        with http(endpoint) as asked:
            text = asked.get("/metrics").text
        [line] = [line for line in text.splitlines() if line.startswith("mars:stream_migrations_total{")]
        return float(line.split()[-1])

    before = counted()
    client.lives = [2]
    with caplog.at_level(logging.INFO, "mars_ray.requests"):
        events(endpoint, CHAT)
        settled(endpoint)
    assert counted() == before + 1
    assert [json.loads(each.message)["migrations"] for each in caplog.records if "chat" in each.message] == [1]


def test_a_stream_goes_on_in_the_same_replica_after_its_engine_process_was_killed() -> None:
    body = CHAT | {"ignore_eos": True, "max_tokens": 400, "mode": "ar"}
    with served(config_of(), restarts=1) as endpoint:
        expected = joined(events(endpoint, body))
        with (
            http(endpoint) as client,
            client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as got,
        ):
            lines = got.iter_lines()
            first = [next(lines) for _ in range(6)]
            assert endpoint.engine.process is not None
            os.kill(endpoint.engine.process.pid, signal.SIGKILL)
            rest = list(lines)
        found = [json.loads(line.removeprefix("data: ")) for line in first + rest if line and "[DONE]" not in line]
        assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
        assert joined(found) == expected
        with http(endpoint) as client:
            assert client.get("/readyz").status_code == 200

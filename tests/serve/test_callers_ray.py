"""Callers that send lists of prompts, and callers that leave, behind each of the proxies that Ray Serve has."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from tests.serve.cluster_samples import GATEWAY, STEP_SECONDS, Cluster, cluster, deploy_file

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

PYTHON_PROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}
WORDS = ("Ann", "Bob: a list", "Ann, Bob: put them in a numbered list.", "Tell me about Ann.")
IDS = ([5], [6, 7], [8, 9, 10], [5, 6, 7, 8])
LEAVING = 8
LONG = {"model": "bundled", "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "mode": "ar"}


@pytest.fixture(scope="module", params=["haproxy", pytest.param("python", marks=pytest.mark.slow)])
def proxied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Engines with eight rows or more behind one of the proxies."""
    if request.param == "haproxy":
        yield request.getfixturevalue("running")
        return
    engine = {"max_num_seqs": 8, "max_waiting_seqs": 64}  # a list has 32 prompts at work at a time
    config = deploy_file(tmp_path_factory.mktemp("serve") / "serve.yaml", {"engine": engine})
    with cluster("--config", str(config), environment=PYTHON_PROXY) as started:
        yield started


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompts", [WORDS, IDS], ids=["texts", "ids"])
@pytest.mark.parametrize("count", [2, 16, 128])
def test_each_prompt_of_a_list_gets_the_answer_it_would_get_alone(
    proxied: Cluster, count: int, prompts: tuple[Any, ...], stream: bool
) -> None:
    with OpenAI(base_url=f"{proxied.url}/v1", api_key="none", max_retries=0, timeout=STEP_SECONDS) as client:
        asked: dict[str, Any] = {"model": "bundled", "temperature": 0, "max_tokens": 8, "extra_body": {"mode": "exact"}}
        alone = [client.completions.create(prompt=each, **asked).choices[0].text for each in prompts]
        given = [prompts[number % len(prompts)] for number in range(count)]
        texts = [""] * count
        if stream:
            for chunk in client.completions.create(prompt=given, stream=True, **asked):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            for choice in client.completions.create(prompt=given, **asked).choices:
                texts[choice.index] += choice.text
    assert texts == [alone[number % len(prompts)] for number in range(count)]
    assert not proxied.stalls_of(GATEWAY)


def by_socket(proxied: Cluster, until_running: Callable[[], None]) -> None:
    """Head and body in two packets, as most clients send them, and the connection closed."""
    body = json.dumps(LONG).encode()
    url = proxied.url
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url[7:]}\r\ncontent-type: application/json\r\n"
    host, port = url[7:].split(":")
    with socket.create_connection((host, int(port)), timeout=STEP_SECONDS) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        raw.sendall(body)
        until_running()


def by_pool(proxied: Cluster, until_running: Callable[[], None]) -> None:
    """A client that gives up waiting, and stays open."""
    asyncio.run(given_up(proxied, until_running, proxied.until_idle))


def by_client(proxied: Cluster, until_running: Callable[[], None]) -> None:
    """A client that gives up waiting, and is closed."""
    asyncio.run(given_up(proxied, until_running, lambda: None))


async def given_up(proxied: Cluster, until_running: Callable[[], None], before_closing: Callable[[], None]) -> None:
    async with httpx2.AsyncClient(timeout=STEP_SECONDS) as client:
        asked = asyncio.create_task(client.post(f"{proxied.url}/v1/completions", json=LONG))
        await asyncio.to_thread(until_running)
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked
        await asyncio.to_thread(before_closing)


@pytest.mark.parametrize("leave", [by_socket, by_pool, by_client])
def test_a_caller_that_leaves_its_whole_answer_frees_its_rows(
    proxied: Cluster, leave: Callable[[Cluster, Callable[[], None]], None]
) -> None:
    all_run = Event()

    def until_running() -> None:
        assert all_run.wait(STEP_SECONDS), "they do not all run"

    def ended_by_themselves() -> float:
        ended = proxied.metric("vllm:request_success_total")
        return sum(count for labels, count in ended.items() if 'finished_reason="length"' in labels)

    before = ended_by_themselves()
    with ThreadPoolExecutor(LEAVING) as callers:
        leaving = [callers.submit(leave, proxied, until_running) for _ in range(LEAVING)]
        ends_s = time.monotonic() + STEP_SECONDS
        # A fast machine may answer the first before the last has come.
        while sum(proxied.metric("vllm:num_requests_running").values()) + ended_by_themselves() - before < LEAVING:
            assert time.monotonic() < ends_s, "they do not all run"
        all_run.set()
        for left in leaving:
            left.result()
    proxied.until_idle()
    # Where other work slows the clients down, some answers end before all run. Without a cancel all would.
    assert ended_by_themselves() - before < LEAVING, "they were not decoded to their ends"

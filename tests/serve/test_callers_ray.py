"""Callers that send lists of prompts, and callers that leave, behind each of the proxies that Ray Serve has."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
IMPATIENT = httpx2.Timeout(STEP_SECONDS, read=0.2)
LONG = {"model": "bundled", "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "mode": "ar"}


@pytest.fixture(scope="module", params=["haproxy", pytest.param("python", marks=pytest.mark.slow)])
def proxied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Engines with eight rows or more behind one of the proxies."""
    if request.param == "haproxy":
        yield request.getfixturevalue("running")
        return
    engine = {"max_num_seqs": 8, "max_waiting_seqs": 32, "compiled": False}
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


def by_socket(url: str, _pool: httpx2.Client, until_running: Callable[[], None]) -> None:
    """Head and body in two packets, as most clients send them, and the connection closed."""
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url[7:]}\r\ncontent-type: application/json\r\n"
    host, port = url[7:].split(":")
    with socket.create_connection((host, int(port)), timeout=STEP_SECONDS) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        raw.sendall(body)
        until_running()


def by_pool(url: str, pool: httpx2.Client, _until_running: Callable[[], None]) -> None:
    """A client that gives up waiting, and stays open."""
    with pytest.raises(httpx2.ReadTimeout):
        pytest.fail(pool.post(f"{url}/v1/completions", json=LONG).text[:300])


def by_client(url: str, _pool: httpx2.Client, _until_running: Callable[[], None]) -> None:
    """A client that gives up waiting, and is closed."""
    with pytest.raises(httpx2.ReadTimeout):
        pytest.fail(httpx2.post(f"{url}/v1/completions", json=LONG, timeout=IMPATIENT).text[:300])


@pytest.mark.parametrize("leave", [by_socket, by_pool, by_client])
def test_a_caller_that_leaves_its_whole_answer_frees_its_rows(
    proxied: Cluster, leave: Callable[[str, httpx2.Client, Callable[[], None]], None]
) -> None:
    all_ran = Event()

    def until_running() -> None:
        """Wait until one of the callers has seen all of them run: the next one may find that it has left."""
        ends_s = time.monotonic() + STEP_SECONDS
        while not all_ran.is_set():
            assert time.monotonic() < ends_s, "they do not all run"
            if sum(proxied.metric("mars:num_requests_running").values()) == LEAVING:
                all_ran.set()

    def generated() -> float:
        return sum(proxied.metric("mars:generation_tokens_total").values())

    before = generated()
    with ExitStack() as stack:
        pool = stack.enter_context(httpx2.Client(timeout=IMPATIENT))
        callers = stack.enter_context(ThreadPoolExecutor(LEAVING))
        for left in [callers.submit(leave, proxied.url, pool, until_running) for _ in range(LEAVING)]:
            left.result()
        proxied.until_idle()
    assert generated() - before < LEAVING * 1900 / 2, "they were not decoded to their ends"

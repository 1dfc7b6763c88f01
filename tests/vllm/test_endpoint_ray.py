"""`mars-ray serve` with two engines of vLLM: callers, the controller's thresholds, an engine killed, an update."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

from tests.vllm.cluster_engines import ENVIRONMENT, VLLM_ARGS  # noqa: E402, I001

import httpx2  # noqa: E402
import psutil  # noqa: E402
import yaml  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402

from mars_ray import LLM, SamplingParams  # noqa: E402
from mars_ray.load.client import Target  # noqa: E402
from mars_ray.load.generator import run_load  # noqa: E402
from mars_ray.load.plan import closed_loop  # noqa: E402
from tests.serve.cluster_samples import COMMAND, ENGINE, SOON, STEP_SECONDS, WORKER, Cluster, cluster, deploy_file  # noqa: E402
from tests.serve.load_samples import PROMPT_POOL, thresholds, until  # noqa: E402

QUESTIONS = PROMPT_POOL[::20]
MAX_TOKENS = 24
STREAMED = 96
LONG = {"ignore_eos": True, "threshold": 1.0}


def config_of(path: Path, **args: Any) -> Path:
    engine = {"engine": "vllm", "dtype": "float32", "threads": 1, "max_num_seqs": 4, "vllm_args": VLLM_ARGS}
    deploy_file(
        path,
        {"classes": [{"name": "standard", "floor": 0.5}], "control": SOON, "engine": engine} | args,
        num_replicas=2,
        health_check_timeout_s=30,  # a step may take seconds under the interpreter
    )
    fields = yaml.safe_load(path.read_text())
    _, gateway = fields["applications"][0]["deployments"]
    gateway["num_replicas"] = 2  # an update replaces one after the other
    path.write_text(yaml.safe_dump(fields))
    return path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = config_of(tmp_path_factory.mktemp("serve") / "serve.yaml")
    with cluster("--config", str(config), environment=ENVIRONMENT) as started:
        started.until_engines(2)
        yield started


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Answers of our own engine, one token at a time."""
    with LLM("bundled", dtype="float32", engine="mars") as llm:
        outputs = llm.chat(QUESTIONS, SamplingParams(max_tokens=MAX_TOKENS), mode="ar")
    return [output.text for output in outputs]


def client_of(running: Cluster) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=4 * STEP_SECONDS)


def test_callers_get_the_answers_of_our_engine_from_both_engines(running: Cluster, expected: list[str]) -> None:
    async def ask() -> list[Any]:
        async with client_of(running) as client:
            create = client.chat.completions.create
            asked = {"model": "bundled", "temperature": 0, "max_tokens": MAX_TOKENS, "extra_body": {"mode": "exact"}}
            return await asyncio.gather(*(create(messages=messages, **asked) for messages in QUESTIONS))

    answers = asyncio.run(ask())
    assert [answer.choices[0].message.content for answer in answers] == expected
    served = running.metric("vllm:generation_tokens_total")
    assert len(served) == 2 and all(served.values())


def test_a_threshold_that_an_operator_sets_reaches_the_answers(running: Cluster) -> None:
    until(lambda: thresholds(running) == [1.0, 1.0], lambda: thresholds(running))  # earlier tests were a load
    before = running.ask(max_tokens=MAX_TOKENS)[1]["usage"]
    with httpx2.Client(base_url=running.url, timeout=STEP_SECONDS) as client:
        client.put("/control/threshold", json={"threshold": 0.6}).raise_for_status()
        until(lambda: thresholds(running) == [0.6, 0.6], lambda: thresholds(running))
        lowered = running.ask(max_tokens=MAX_TOKENS)[1]["usage"]
        client.delete("/control/threshold").raise_for_status()
    until(lambda: thresholds(running) == [1.0, 1.0], lambda: thresholds(running))
    assert (before["threshold_low"], lowered["threshold_low"]) == (1.0, 0.6)


def test_the_controller_lowers_the_threshold_under_load_and_answers_show_it(running: Cluster) -> None:
    async def under_load() -> list[float]:
        stop = asyncio.Event()
        plan = closed_loop(PROMPT_POOL, seed=6, requests=None, max_tokens=64)
        target = Target(url=running.url, model="bundled", timeout_s=4 * STEP_SECONDS)
        load = asyncio.create_task(run_load(target, plan.requests, clients=24, stop=stop))
        try:
            await asyncio.to_thread(
                until, lambda: max(thresholds(running), default=1.0) < 1, lambda: running.get("/control")
            )
            _, answer = await asyncio.to_thread(running.ask, max_tokens=MAX_TOKENS)
        finally:
            stop.set()
            await load
        return [answer["usage"]["threshold_low"]]

    [low] = asyncio.run(under_load())
    assert 0.5 <= low < 1
    until(lambda: thresholds(running) == [1.0, 1.0], lambda: running.get("/control"))


def test_streams_of_an_engine_that_is_killed_go_on_with_the_same_text(running: Cluster) -> None:
    begun = threading.Event()

    async def whole(client: AsyncOpenAI, number: int) -> str:
        answer = await client.completions.create(
            model="bundled", prompt=f"{number} w", max_tokens=STREAMED, seed=number, extra_body=LONG
        )
        return answer.choices[0].text

    async def streamed(client: AsyncOpenAI, number: int) -> str:
        text = ""
        async for chunk in await client.completions.create(
            model="bundled", prompt=f"{number} w", max_tokens=STREAMED, seed=number, stream=True, extra_body=LONG
        ):
            begun.set()
            text += chunk.choices[0].text
        return text

    async def test() -> tuple[list[str], list[str]]:
        async with client_of(running) as client:
            streams = [asyncio.create_task(streamed(client, number)) for number in range(6)]
            await asyncio.to_thread(begun.wait, 4 * STEP_SECONDS)
            running.kill(WORKER)
            disturbed = await asyncio.gather(*streams)
            return disturbed, await asyncio.gather(*(whole(client, number) for number in range(6)))

    before = {worker.pid for worker in running.processes(WORKER)}
    disturbed, undisturbed = asyncio.run(test())
    assert disturbed == undisturbed
    until(lambda: len({worker.pid for worker in running.processes(WORKER)} - before) == 1)  # the replica stays
    running.until_engines(2)
    running.until_idle()


@contextmanager
def deployed_again(running: Cluster, config: Path) -> Iterator[None]:
    """Run `mars-ray serve` again on the cluster that runs; the block begins when it is ready."""
    family = psutil.Process(running.process.pid).children(recursive=True)
    [address] = {word.split("=")[1] for each in family for word in each.cmdline() if word.startswith("--gcs-address=")}
    environment = os.environ | ENVIRONMENT | {"RAY_ADDRESS": address}
    command = [str(COMMAND), "serve", "--config", str(config), "--port", running.url.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            assert any(line.startswith("ready") for line in process.stdout)
            yield
        finally:
            process.terminate()
            process.communicate()


def test_a_rolling_update_fails_no_request(running: Cluster, expected: list[str], tmp_path: Path) -> None:
    """The last test: the endpoint ends with the command that deployed it last."""
    before = {replica.pid for replica in running.processes(ENGINE)}
    updated = threading.Event()

    async def keep_asking(number: int) -> int:
        answered = 0
        async with client_of(running) as client:
            while not updated.is_set():
                question = (number + answered) % len(QUESTIONS)
                answer = await client.chat.completions.create(
                    model="bundled",
                    messages=QUESTIONS[question],  # type: ignore[arg-type]  # plain dictionaries
                    temperature=0,
                    max_tokens=MAX_TOKENS,
                    extra_body={"mode": "exact"},
                )
                assert answer.choices[0].message.content == expected[question]
                answered += 1
        return answered

    async def callers() -> list[int]:
        return await asyncio.gather(*map(keep_asking, range(4)))

    with ThreadPoolExecutor() as pool:
        asked = pool.submit(asyncio.run, callers())
        try:
            with deployed_again(running, config_of(tmp_path / "serve.yaml", threshold=0.9)):
                until(lambda: not before & {replica.pid for replica in running.processes(ENGINE)})
                running.until_engines(2)
                until(lambda: thresholds(running) == [0.9, 0.9])
                updated.set()
                assert all(asked.result())
        finally:
            updated.set()

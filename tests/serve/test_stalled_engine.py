"""An engine that stalls under four callers is replaced, and all of them get the answers of an undisturbed engine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import psutil
import pytest

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.process.async_engine import STALLED, AsyncEngine
from mars_ray.engine.request import Request
from mars_ray.engine.stats.state import RestartCount
from mars_ray.model.resolve import resolve_model
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.serve.http.engine_calls import EngineCalls
from mars_ray.serve.replicas.engine_client import LocalEngineClient
from mars_ray.serve.replicas.engine_metrics import EngineMetrics
from tests.engine import stalling
from tests.factories.engine import engine_spec, request
from tests.samples import Cli
from tests.serve.endpoint_samples import config_of, served

CALLERS = 4
STALL_SECONDS = 2.0
STEP_SECONDS = 5.0


@asynccontextmanager
async def running() -> AsyncIterator[tuple[AsyncEngine, LocalEngineClient]]:
    engine, facts = await AsyncEngine.start(
        engine_spec(resolve_model("bundled")), stall_seconds=STALL_SECONDS, step_seconds=STEP_SECONDS, restarts=3
    )
    model = ModelInfo(name="bundled", created=1, engine=facts)
    try:
        yield engine, LocalEngineClient(engine, model, EngineMetrics(model="bundled", replica="r"))
    finally:
        await engine.close()


async def answers_of(
    client: LocalEngineClient, requests: Sequence[Request], once_begun: Callable[[], object] = lambda: None
) -> list[list[int]]:
    """Return the tokens of each streamed answer. Once all have begun, `once_begun` is called."""
    calls = EngineCalls(client, migration_limit=2)
    answers: list[list[int]] = [[] for _ in requests]

    async def stream(request: Request, tokens: list[int]) -> None:
        async def take(part: Sequence[Chunk]) -> None:
            has_begun = all(answers)
            tokens.extend(token for chunk in part for token in chunk.tokens)
            if all(answers) and not has_begun:
                once_begun()

        await calls.stream(request, take, ResponseUsage(prompt_tokens=len(request.prompt)))

    await asyncio.gather(*map(stream, requests, answers))
    return answers


def long_requests(name: str) -> list[Request]:
    return [
        request(f"{name}{number}", range(5, 40 + number), max_tokens=600, ignore_eos=True) for number in range(CALLERS)
    ]


def stop(engine: AsyncEngine) -> None:
    assert engine.process is not None
    os.kill(engine.process.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    "fault",
    ["stop", pytest.param("hang", marks=pytest.mark.slow), pytest.param("yield nothing", marks=pytest.mark.slow)],
)
def test_a_stalled_engine_is_replaced_and_its_callers_get_their_answers(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = tmp_path / "fault"
    monkeypatch.setenv("MARS_STALL", str(order))
    path = os.pathsep.join(filter(None, (*stalling.__path__, os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)  # of the server that forks the engines

    async def test() -> None:
        async with running() as (engine, client):
            undisturbed = await answers_of(client, long_requests("before"))
            assert await client.obstacle() is None
            obstacles = asyncio.create_task(first_obstacle(client))
            begin = (lambda: stop(engine)) if fault == "stop" else (lambda: order.write_text(fault))
            assert await answers_of(client, long_requests("stalled"), begin) == undisturbed
            assert await obstacles == STALLED
            assert await client.obstacle() is None
            assert (await engine.state()).restarts == (RestartCount("stalled", 1),)
            [text] = await client.metrics()
            assert 'mars:engine_restarts_total{model_name="bundled",reason="stalled",replica="r"} 1.0' in text
            assert 'mars:engine_ready{model_name="bundled",replica="r"} 1.0' in text

    asyncio.run(test())


async def first_obstacle(client: LocalEngineClient) -> str:
    while (obstacle := await client.obstacle()) is None:
        await asyncio.sleep(0.01)
    return obstacle


@pytest.mark.slow
def test_the_only_request_of_an_engine_that_stalls_for_another_reason_is_answered() -> None:
    async def test() -> None:
        async with running() as (engine, client):
            [wanted, *_] = long_requests("only")
            undisturbed = await answers_of(client, [wanted])
            assert await answers_of(client, [wanted], lambda: stop(engine)) == undisturbed

    asyncio.run(test())


@pytest.mark.slow
def test_an_endpoint_says_why_it_is_not_ready_until_its_engine_is_replaced(mars_ray: Cli) -> None:
    def ask(number: int) -> str:
        body = {"prompt": f"{number} " * 9, "max_tokens": 600, "ignore_eos": True, "temperature": 0}
        answer = httpx2.post(f"{endpoint.url}/v1/completions", json={"model": "bundled"} | body, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def status() -> str:
        endpoint.beat()
        code, shown, said = mars_ray("status", "--url", endpoint.url)
        assert code == 0, said
        return " ".join(shown.split())

    with (
        served(config_of(), stall_seconds=STALL_SECONDS, step_seconds=STEP_SECONDS, restarts=3) as endpoint,
        ThreadPoolExecutor(CALLERS) as callers,
    ):
        undisturbed = list(callers.map(ask, range(CALLERS)))
        assert httpx2.get(f"{endpoint.url}/readyz").text == "ready"
        answers = [callers.submit(ask, number) for number in range(CALLERS)]
        while endpoint.in_flight()[0] < CALLERS:
            pass
        assert endpoint.engine.process is not None
        process = psutil.Process(endpoint.engine.process.pid)
        server = process.parent()
        server.suspend()  # so that no engine takes the place of the stalled one yet
        try:
            process.suspend()
            while (readyz := httpx2.get(f"{endpoint.url}/readyz")).status_code == 200:
                pass
            assert (readyz.status_code, readyz.text) == (503, f"not ready: {STALLED}")
            health = httpx2.get(f"{endpoint.url}/health")
            assert (health.status_code, health.json()["error"]["message"]) == (503, STALLED)
            assert f"test: {STALLED}" in status()
            assert (
                'mars:engine_ready{model_name="bundled",replica="test"} 0.0'
                in httpx2.get(f"{endpoint.url}/metrics").text
            )
        finally:
            server.resume()
        assert [answer.result() for answer in answers] == undisturbed
        assert httpx2.get(f"{endpoint.url}/health").status_code == 200
        assert "test: processes replaced: 1 stalled" in status()


@pytest.mark.slow
def test_a_stopped_engine_keeps_its_last_state_for_reports_until_it_is_replaced() -> None:
    async def test() -> None:
        async with running() as (engine, client):
            calls = asyncio.create_task(answers_of(client, long_requests("state"), lambda: stop(engine)))
            await first_obstacle(client)
            while (state := await engine.state()).obstacle is None:
                pass
            assert (state.obstacle, state.running, state.waiting) == (STALLED, 0, 0)
            assert len(await calls) == CALLERS
            assert (await engine.state()).obstacle is None

    asyncio.run(test())

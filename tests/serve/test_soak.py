"""More requests than it can answer, for a while: every one ends in an answer or a 429, and nothing is left of them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from mars_ray.load.arrivals import Scales, read_trace
from mars_ray.load.plan import LoadPlan, replay
from tests.serve.cluster_samples import ENGINE, GATEWAY, TOKENIZER, WORKER, Cluster, cluster, deploy_file
from tests.serve.load_samples import PROMPT_POOL, capacity_per_s, nothing_was_lost, send

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(3600)]
TRACE = Path(__file__).parents[3] / "shared/data/traces/AzureLLMInferenceTrace_conv.csv.gz"
TRACE_S = 1800
OVERLOAD = 1.5
PROMPT_SCALE, OUTPUT_SCALE = 1 / 32, 1 / 8
"""A word of the pool is about two tokens of the bundled tokenizer: prompts are a sixteenth of what they were."""

GROWTH_MAX = 0.1
"""Of the memory of each process between the end of the first third and the end."""


@pytest.fixture
def overloaded(tmp_path: Path) -> Iterator[Cluster]:
    limits = {"requests": 64, "requests_per_key": 64}
    with cluster("--config", str(deploy_file(tmp_path / "serve.yaml", {"limits": limits}))) as started:
        yield started


def memory_bytes(running: Cluster) -> dict[str, int]:
    """What only they have of each kind of process that takes part."""
    return {
        name: sum(each.memory_full_info().uss for each in running.processes(name))
        for name in (GATEWAY, ENGINE, WORKER, TOKENIZER)
    }


@pytest.mark.skipif(not TRACE.exists(), reason=f"the trace is not at {TRACE}")
def test_thirty_minutes_of_a_real_service_at_one_and_a_half_times_the_capacity(overloaded: Cluster) -> None:
    rows = [row for row in read_trace(TRACE) if row.arrival_s < TRACE_S]

    def plan(speed: float, part: slice) -> LoadPlan:
        scales = Scales(speed=speed, prompt=PROMPT_SCALE, output=OUTPUT_SCALE)
        return replay(rows[part], scales, PROMPT_POOL, 0, None, None, None)

    capacity = capacity_per_s(overloaded, plan(1.0, slice(600)), 600)
    speed = OVERLOAD * capacity / (len(rows) / TRACE_S)
    third = len(rows) // 3
    records = send(overloaded, plan(speed, slice(third)))
    before = memory_bytes(overloaded)
    records += send(overloaded, plan(speed, slice(third, None)))
    after = memory_bytes(overloaded)
    print(f"capacity {capacity:.1f} requests/s, {speed:.1f} times as fast as recorded, memory {before} -> {after}")
    nothing_was_lost(overloaded, records, len(rows))
    assert all(after[name] <= (1 + GROWTH_MAX) * before[name] for name in before)


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Cluster]:
    """One engine, and a second one within seconds when there is work for it."""
    soon = {"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 11}
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4, **soon}
    config = deploy_file(tmp_path / "serve.yaml", {"engine": {"max_num_seqs": 8}}, autoscaling_config=scaling)
    with cluster("--config", str(config)) as started:
        yield started


def test_engines_come_with_the_load_and_go_once_what_they_run_is_answered(elastic: Cluster) -> None:
    async def one(client: AsyncOpenAI, number: int) -> int:
        stream = await client.completions.create(
            model="bundled",
            prompt=f"{number} x",
            max_tokens=1500,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "threshold": 1.0},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        return chunks[-1].usage.completion_tokens

    async def test() -> list[int]:
        async with AsyncOpenAI(base_url=f"{elastic.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            load = [asyncio.create_task(one(client, number)) for number in range(24)]
            await asyncio.to_thread(elastic.until_engines, 2)
            # A few long ones on both while the rest ends: one engine is to go under them.
            load += [asyncio.create_task(one(client, 100 + number)) for number in range(3)]
            return await asyncio.gather(*load)

    assert asyncio.run(test()) == [1500] * 27
    elastic.until_engines(1)

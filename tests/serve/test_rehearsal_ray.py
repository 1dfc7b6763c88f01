"""A real cluster that rehearses a GPU: load lowers the threshold, forwards give more tokens, and both come back."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from mars_ray.load.client import Target
from mars_ray.load.generator import run_load
from mars_ray.load.plan import closed_loop
from mars_ray.load.record import RequestRecord
from tests.serve.cluster_samples import SOON, STEP_SECONDS, Cluster, cluster, deploy_file
from tests.serve.load_samples import PROMPT_POOL, thresholds, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
MACHINE = "l4/qwen2.5-7b"  # a step takes 65 ms there, which even a busy machine here can do


async def _answers(
    running: Cluster, clients: int, enough: Callable[[list[RequestRecord]], bool]
) -> list[RequestRecord]:
    """Return the answers to `clients` callers who go on until `enough` is true of them."""
    stop = asyncio.Event()
    records: list[RequestRecord] = []
    plan = closed_loop(PROMPT_POOL, seed=6, requests=None, max_tokens=64)
    target = Target(url=running.url, model="bundled", timeout_s=STEP_SECONDS)
    load = asyncio.create_task(run_load(target, plan.requests, clients=clients, stop=stop, on_record=records.append))
    ends_s = time.monotonic() + 2 * STEP_SECONDS
    try:
        while not await asyncio.to_thread(enough, records):
            assert time.monotonic() < ends_s, f"{len(records)} answers, thresholds {thresholds(running)}"
            await asyncio.sleep(0.2)
    finally:
        stop.set()
        await load
    return records


def _tokens_per_forward(records: list[RequestRecord]) -> float:
    return mean(record.tokens_per_forward for record in records if record.tokens_per_forward is not None)


@pytest.mark.slow
def test_load_lowers_the_threshold_and_raises_tokens_per_forward_until_the_load_is_gone(tmp_path: Path) -> None:
    config = deploy_file(
        tmp_path / "serve.yaml",
        {
            "classes": [{"name": "standard", "floor": 0.8}],
            "control": {"max_accuracy_loss": 0.05} | SOON,
            "engine": {"rehearse": MACHINE, "max_num_seqs": 4, "max_waiting_seqs": 64},
        },
    )
    with cluster("--config", str(config)) as started:
        started.until_engines(1)
        alone = asyncio.run(_answers(started, 1, lambda records: len(records) >= 20))
        assert thresholds(started) == [1.0]

        lowered: list[int] = []

        def answered_below(records: list[RequestRecord]) -> bool:
            if not lowered and thresholds(started) < [1.0]:
                lowered.append(len(records))
            return bool(lowered) and len(records) >= lowered[0] + 60

        loaded = asyncio.run(_answers(started, 24, answered_below))
        # The first of these began before the threshold fell.
        below = [record for record in loaded[lowered[0] + 28 :] if record.tokens_per_forward is not None]
        assert _tokens_per_forward(below) > 1.1 * _tokens_per_forward(alone)

        until(lambda: thresholds(started) == [1.0], lambda: started.get("/control"))
        [slow_steps] = started.metric("mars:rehearsal_slow_steps").values()
        [steps] = started.metric("mars:engine_steps").values()
        assert slow_steps < 0.2 * steps

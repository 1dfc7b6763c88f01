"""The agent's reading of vLLM's metrics, and its thresholds, without vLLM and without Ray."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mars_ray.engine.stats.profile import Profile
from mars_ray.vllm.agent.middleware import Agent
from mars_ray.vllm.agent.served_engine import ServedEngine
from mars_ray.vllm.agent.served_metrics import RecentLatency, ServedMetrics
from mars_ray.vllm.engine.records import Records
from mars_ray.vllm.forward_log import LoggedForward
from mars_ray.vllm.settings import KEY

CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_seqs=4),
    cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
    additional_config={KEY: {"block": 4, "mask_id": 9}},
)


class RecordingClient:
    """Answers as vLLM does when its engine has run nothing, and keeps what is set."""

    vllm_config = CONFIG

    def __init__(self) -> None:
        self.thresholds: list[float] = []
        self.fails = False

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        if self.fails:
            raise ValueError("the worker is busy")
        if method == "set_mars_threshold":
            self.thresholds += args
        return [{"mars_record": {"step_times": {}}, "mars_forwards": []}.get(method)]


def engine_of(client: RecordingClient, registry: CollectorRegistry) -> ServedEngine:
    records = Records(Profile(4), frozenset())
    return ServedEngine(client, records, lambda: ServedMetrics(registry.collect()), threshold=1.0, block=4)


def test_the_state_has_the_load_that_vllm_counts() -> None:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "", registry=registry).set(3)
    Gauge("vllm:num_requests_waiting", "", registry=registry).set(5)
    Gauge("vllm:kv_cache_usage_perc", "", registry=registry).set(0.5)
    ended = Counter("vllm:request_success", "", ["finished_reason"], registry=registry)
    ended.labels("stop").inc(2)
    ended.labels("length").inc(1)
    Counter("vllm:generation_tokens", "", registry=registry).inc(70)
    Histogram("vllm:request_generation_tokens", "", registry=registry).observe(50)
    state = asyncio.run(engine_of(RecordingClient(), registry).state())
    [standard] = state.classes
    assert (standard.running, standard.waiting, standard.ended, standard.arrived) == (3, 5, 3, 11)
    assert (standard.tokens, state.tokens_running, state.kv_tokens) == (50, 20, 80)


def test_the_profile_has_only_the_block_that_vllm_uses() -> None:
    points = Records(Profile(4), frozenset()).points()
    assert {(len(point.tokens), point.positions) for point in points} == {(1, (7.0,))}


@pytest.mark.parametrize(("draft", "looks"), [(5, 1), (9, 0)])
def test_masks_after_a_right_draft_that_is_a_stop_token_are_not_observed(draft: int, looks: int) -> None:
    profile = Profile(4)
    forward = LoggedForward(
        threshold=1.0,
        mask_confidences=[0.9, 0.9, 0.9],
        tokens=[1, 2, 3, 4],
        drafts=[draft],
        draft_confidences=[0.9],
        right=1,
        accepted_confidences=[],
        agreed=[],
    )
    Records(profile, frozenset({9})).read({"step_times": {}}, [forward])
    profile.points()
    assert profile.forwards == looks


def test_a_threshold_that_vllm_did_not_take_is_not_reported() -> None:
    async def test() -> None:
        client = RecordingClient()
        engine = engine_of(client, CollectorRegistry())
        for fails, reported in ((True, 1.0), (False, 0.6)):
            client.fails = fails
            engine.set_thresholds({"standard": 0.6})
            await asyncio.sleep(0)
            client.fails = False
            assert (await engine.state()).classes[0].threshold == reported
        assert client.thresholds == [0.6]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        ([(0.0, {1.0: 0.0, 2.0: 0.0, float("inf"): 0.0})], None),
        ([(0.0, {1.0: 0.0, 2.0: 0.0, float("inf"): 0.0}), (1.0, {1.0: 90.0, 2.0: 100.0, float("inf"): 100.0})], 1.5),
        (
            [(0.0, {1.0: 90.0, 2.0: 100.0, float("inf"): 100.0}), (20.0, {1.0: 90.0, 2.0: 100.0, float("inf"): 200.0})],
            2.0,
        ),
    ],
    ids=["none", "within a bucket", "above all bounds"],
)
def test_the_percentile_is_that_of_new_values(counted: list[tuple[float, dict[float, float]]], expected: float) -> None:
    latency = RecentLatency()
    found = [latency.p95(seconds, buckets) for seconds, buckets in counted]
    assert found[-1] == expected


def test_values_older_than_the_window_are_forgotten() -> None:
    latency = RecentLatency()
    slow, both = {1.0: 0.0, 2.0: 10.0, float("inf"): 10.0}, {1.0: 10.0, 2.0: 20.0, float("inf"): 20.0}
    latency.p95(0.0, {1.0: 0.0, 2.0: 0.0, float("inf"): 0.0})
    assert (latency.p95(1.0, slow) or 0.0) > 1.0
    assert (latency.p95(11.0, both) or 0.0) <= 1.0


def test_a_server_without_a_controller_in_its_settings_does_not_start() -> None:
    async def served(*_: object) -> None:
        raise AssertionError("the server must not start")

    async def test() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "lifespan.startup"}

        app = SimpleNamespace(state=SimpleNamespace(engine_client=RecordingClient()))
        await Agent(served)({"type": "lifespan", "app": app}, receive, send)
        return sent

    [message] = asyncio.run(test())
    assert message["type"] == "lifespan.startup.failed"
    assert (
        message["message"]
        == "additional_config mars.controller is missing; the agent needs it, for example {'name': 'chat'}."
    )

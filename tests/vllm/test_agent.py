"""What the agent counts and reports, and its thresholds, without vLLM and without Ray."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mars_ray.engine.stats.profile import Profile
from mars_ray.vllm.agent.middleware import Agent
from mars_ray.vllm.agent.served_engine import ServedEngine
from mars_ray.vllm.engine.records import Records
from mars_ray.vllm.engine_counts import EngineCounts
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


def engine_of(client: RecordingClient, counts: EngineCounts | None = None) -> ServedEngine:
    records = Records(Profile(4), frozenset())
    return ServedEngine(client, records, counts or EngineCounts(), threshold=1.0, block=4)


def step(*, running: int = 0, waiting: int = 0, ended: tuple[tuple[int, float], ...] = (), **iteration: Any) -> Any:
    """Figures of a step as vLLM gives them; `ended` are tokens and seconds per token of requests."""
    scheduler = SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.5,
        prefix_cache_stats=SimpleNamespace(hits=8),
    )
    none = {
        "num_generation_tokens": 0,
        "num_prompt_tokens": 0,
        "num_preempted_reqs": 0,
        "time_to_first_tokens_iter": [],
    }
    finished = [SimpleNamespace(num_generation_tokens=n, mean_time_per_output_token=s) for n, s in ended]
    return scheduler, SimpleNamespace(**(none | iteration), finished_requests=finished)


def test_the_state_has_the_load_that_vllm_counts() -> None:
    counts = EngineCounts()
    counts.record(*step(num_generation_tokens=60, num_prompt_tokens=30, num_preempted_reqs=1))
    counts.record(*step(running=3, waiting=4, num_generation_tokens=10, ended=((20, 0.1), (30, 0.1), (1, 0.0))))
    engine = engine_of(RecordingClient(), counts)
    state = asyncio.run(engine.state())
    [standard] = state.classes
    assert (standard.running, standard.waiting, standard.ended, standard.arrived) == (3, 5, 3, 11)
    assert (standard.tokens, standard.prompt_tokens, state.tokens_running, state.kv_tokens) == (51, 30, 19, 80)
    assert standard.cached_tokens == 16
    assert state.preemptions == 1 and not engine.idle


def test_latencies_are_those_of_the_last_seconds() -> None:
    now_s = 0.0
    counts = EngineCounts(clock=lambda: now_s)
    counts.record(*step(time_to_first_tokens_iter=[3.0], ended=((2, 0.5), (1, 9.0))))
    assert (counts.ttft_p95_s, counts.tpot_p95_s) == (3.0, 0.5)
    now_s = 8.0
    counts.record(*step(time_to_first_tokens_iter=[1.0]))
    now_s = 12.0
    assert (counts.ttft_p95_s, counts.tpot_p95_s) == (1.0, None)


def test_the_profile_has_only_the_block_that_vllm_uses() -> None:
    points = Records(Profile(4), frozenset()).points()
    assert {(len(point.tokens), point.positions) for point in points} == {(1, (7.0,))}


def test_kept_drafts_are_observed_with_their_ratios_and_audited() -> None:
    profile = Profile(4, lenient=True)
    forward = LoggedForward(
        threshold=0.5,
        mask_confidences=[],
        tokens=[1],
        drafts=[5, 6, 7],
        draft_confidences=[0.9, 0.9, 0.9],
        right=2,
        ratios=[1.0, 0.6, 0.1],
        accepted_confidences=[],
        agreed=[True, False, False],
    )
    records = Records(profile, frozenset())
    records.read({"step_times": {}}, [forward])
    by_threshold = {point.threshold: point for point in profile.points()}
    assert [by_threshold[threshold].audited for threshold in (1.0, 0.6, 0.5, 0.1, 0.05)] == [1, 2, 2, 3, 3]


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
        ratios=[1.0],
        accepted_confidences=[],
        agreed=[],
    )
    Records(profile, frozenset({9})).read({"step_times": {}}, [forward])
    profile.points()
    assert profile.forwards == looks


def test_a_threshold_that_vllm_did_not_take_is_not_reported() -> None:
    async def test() -> None:
        client = RecordingClient()
        engine = engine_of(client)
        for fails, reported in ((True, 1.0), (False, 0.6)):
            client.fails = fails
            engine.set_thresholds({"standard": 0.6})
            await asyncio.sleep(0)
            client.fails = False
            assert (await engine.state()).classes[0].threshold == reported
        assert client.thresholds == [0.6]

    asyncio.run(test())


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

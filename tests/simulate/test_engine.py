"""The simulation against the real engine, whose clock moves by the same step times: no machine's noise in either."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from random import Random
from statistics import mean

import pytest

from mars_ray.control.control_settings import ControlPlan
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import read_prompts
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.engine.sampling.draft_choice import DraftChoice
from mars_ray.engine.stats.step_time import StepTime, StepWork
from mars_ray.load.plan import Texts, bundled_prompts, conversations
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.simulate.arrivals import Arrival
from mars_ray.simulate.machine import Machine
from tests.factories.engine import bundled_checkpoint
from tests.simulate.simulation_samples import run

pytestmark = pytest.mark.fidelity

THRESHOLD, ROWS = 0.9, 6
TIMES = StepTime(
    fixed_s=0.0015,
    seq_s=0.0001,
    position_s=0.00004,
    kv_token_s=1e-7,
    prompt_s=0.001,
    prompt_token_s=0.00004,
    masks_s=0.0003,
)


class Clocked(Engine):
    """An engine for whom a step takes what the model says."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.now_s = 0.0
        options = EngineOptions(max_num_seqs=ROWS, threshold=THRESHOLD)
        super().__init__(checkpoint, options, clock=lambda: self.now_s, new_seed=lambda: 0)
        self.step_time.model = TIMES
        self.step_time.observe = lambda work, seconds: None  # type: ignore[method-assign]
        run_forward = self._forwards.runner.run

        def run_and_wait(packed):  # type: ignore[no-untyped-def]
            decoding = [scheduled for scheduled in self.batch if scheduled.is_decode]
            self.now_s += TIMES.seconds(
                StepWork(
                    num_seqs=len(decoding),
                    positions=sum(scheduled.num_positions for scheduled in decoding),
                    kv_tokens=packed.kv_tokens,
                    prompt_tokens=sum(scheduled.num_positions for scheduled in self.batch if not scheduled.is_decode),
                    masks=sum(scheduled.num_masks for scheduled in decoding),
                )
            )
            return run_forward(packed)

        schedule = self._scheduler.schedule

        def schedule_and_note(masks_for):  # type: ignore[no-untyped-def]
            self.batch = schedule(masks_for)
            return self.batch

        self._forwards.runner.run = run_and_wait  # type: ignore[method-assign]
        self._scheduler.schedule = schedule_and_note  # type: ignore[method-assign]


def moments(rate: float, requests: int) -> list[float]:
    random, now_s, moments = Random(5), 0.0, list[float]()
    for _ in range(requests):
        now_s += random.expovariate(rate)
        moments.append(now_s)
    return moments


def own_answers(checkpoint: Checkpoint, requests: int) -> Iterator[Request]:
    """Prompts of the kind the model was trained with, whose answers end where the model ends them."""
    chat = ChatEncoder(checkpoint.tokenizer)
    for number, messages in zip(
        range(requests), conversations(read_prompts(bundled_prompts()), Random(2)), strict=False
    ):
        prompt = chat.prompt(messages)
        sampling = SamplingParams(max_tokens=128, temperature=0.0)
        yield Request(id=str(number), prompt=tuple(prompt), sampling=sampling, tenant=str(number))


def long_prompts(checkpoint: Checkpoint, requests: int) -> Iterator[Request]:
    """Prompts of up to 700 tokens, with answers of a given length."""
    texts, random = Texts(read_prompts(bundled_prompts()), Random(2)), Random(5)
    for number in range(requests):
        length = random.randint(20, 700)
        prompt = checkpoint.tokenizer(texts.of(length)).input_ids[:length]
        sampling = SamplingParams(max_tokens=random.randint(5, 60), temperature=0.0, ignore_eos=True)
        yield Request(id=str(number), prompt=tuple(prompt), sampling=sampling, tenant=str(number))


@pytest.mark.parametrize(
    ("requests_of", "rate", "requests"),
    [(own_answers, 30.0, 300), (own_answers, 400.0, 500), (long_prompts, 120.0, 120)],
    ids=["light load", "more than it can do", "long prompts, more than it can do"],
)
def test_tokens_and_times_are_those_of_the_real_engine(
    requests_of: Callable[[Checkpoint, int], Iterator[Request]],
    rate: float,
    requests: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A simulated request has no text, so it has no drafts from text.
    monkeypatch.setattr(DraftChoice, "choose", lambda *_: None)
    checkpoint = bundled_checkpoint()
    engine, arrives_s = Clocked(checkpoint), moments(rate, requests)
    coming = list(requests_of(checkpoint, requests))
    added, tokens, first_s, end_s = 0, Counter[int](), dict[int, float](), dict[int, float]()
    while added < requests or engine.busy:
        if not engine.busy:
            engine.now_s = max(engine.now_s, arrives_s[added])
        while added < requests and arrives_s[added] <= engine.now_s:
            engine.add(coming[added])
            added += 1
        for chunk in engine.step():
            number = int(chunk.request_id)
            tokens[number] += len(chunk.tokens)
            if chunk.tokens:
                first_s.setdefault(number, engine.now_s)
            if chunk.finished:
                end_s[number] = engine.now_s
    machine = Machine.model_validate(
        {
            "max_num_seqs": ROWS,
            "max_waiting_seqs": 1024,
            "max_model_len": engine.limits.max_model_len,
            "step_time": asdict(TIMES),
            "profile": [asdict(point) for point in engine.profile.points()],
            "accuracy": [(1.0, 1.0)],
        }
    )
    plan = ControlPlan.model_validate({"settings": {"policy": "fixed"}, "ceiling": THRESHOLD})
    arrivals = [
        Arrival(arrives_s[number], len(request.prompt), tokens[number]) for number, request in enumerate(coming)
    ]
    simulated = run(arrivals, plan, machine).metrics
    assert simulated.tokens == pytest.approx(tokens.total())
    assert simulated.tokens_per_s == pytest.approx(tokens.total() / max(end_s.values()), rel=0.03)
    assert simulated.ttft_ms is not None and simulated.e2e_ms is not None
    e2e_s, ttft_s = (
        mean(times[number] - arrives_s[number] for number in range(requests)) for times in (end_s, first_s)
    )
    # The rows of masks behind drafts are shorter than the block, which the profile takes for that of every row.
    assert simulated.e2e_ms.mean / 1000 == pytest.approx(e2e_s, rel=0.08)
    assert simulated.ttft_ms.mean / 1000 == pytest.approx(ttft_s, rel=0.08)

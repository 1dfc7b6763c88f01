"""The simulation against the real engine, whose clock moves by the same step times: no machine's noise in either."""

from collections.abc import Iterator
from dataclasses import asdict
from random import Random
from statistics import mean

import pytest

from mars_ray.control.control_settings import ControlPlan
from mars_ray.data.prompt_file import read_prompts
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.engine.stats.step_time import StepTime, StepWork
from mars_ray.load.prompts import Texts, bundled_prompts
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.simulate.arrivals import Arrival
from mars_ray.simulate.machine import Machine
from tests.factories.engine import bundled_checkpoint
from tests.simulate.simulation_samples import run

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
        options = EngineOptions(max_num_seqs=ROWS, threshold=THRESHOLD, compiled=False)
        super().__init__(checkpoint, options, clock=lambda: self.now_s, new_seed=lambda: 0)
        self.step_time.model = TIMES
        self.step_time.observe = lambda work, seconds: None  # type: ignore[method-assign]
        run_forward = self._runner.run

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

        self._runner.run = run_and_wait  # type: ignore[method-assign]
        self._scheduler.schedule = schedule_and_note  # type: ignore[method-assign]


def load(rate: float, requests: int) -> list[Arrival]:
    random, now_s, arrivals = Random(5), 0.0, list[Arrival]()
    for _ in range(requests):
        now_s += random.expovariate(rate)
        arrivals.append(Arrival(now_s, random.randint(20, 700), random.randint(5, 60)))
    return arrivals


def requests_for(checkpoint: Checkpoint, arrivals: list[Arrival]) -> Iterator[Request]:
    texts = Texts(read_prompts(bundled_prompts()), Random(2))
    for number, arrival in enumerate(arrivals):
        prompt = checkpoint.tokenizer(texts.of(int(arrival.prompt_tokens))).input_ids[: int(arrival.prompt_tokens)]
        assert len(prompt) == arrival.prompt_tokens
        sampling = SamplingParams(max_tokens=int(arrival.output_tokens), temperature=0.0, ignore_eos=True)
        yield Request(id=str(number), prompt=tuple(prompt), sampling=sampling, tenant=str(number))


@pytest.mark.parametrize(("rate", "requests"), [(3.0, 40), (120.0, 120)], ids=["light load", "more than it can do"])
def test_tokens_and_times_are_those_of_the_real_engine(rate: float, requests: int) -> None:
    checkpoint = bundled_checkpoint()
    engine, arrivals = Clocked(checkpoint), load(rate, requests)
    coming = list(requests_for(checkpoint, arrivals))
    added, tokens, first_s, end_s = 0, 0, dict[int, float](), dict[int, float]()
    while added < len(arrivals) or engine.busy:
        if not engine.busy:
            engine.now_s = max(engine.now_s, arrivals[added].arrival_s)
        while added < len(arrivals) and arrivals[added].arrival_s <= engine.now_s:
            engine.add(coming[added])
            added += 1
        for chunk in engine.step():
            number = int(chunk.request_id)
            tokens += len(chunk.tokens)
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
    found = run(arrivals, plan, machine, ticks_per_s=500).metrics
    assert found.tokens == pytest.approx(tokens)
    # A simulated request looks as far ahead as all do on average. Of real ones some do not, and end last and alone.
    assert found.tokens_per_s == pytest.approx(tokens / max(end_s.values()), rel=0.03)
    assert found.ttft_ms is not None and found.e2e_ms is not None
    arrived = dict(enumerate(arrival.arrival_s for arrival in arrivals))
    # The rows of masks behind drafts are shorter than the block, which the profile takes for that of every row.
    assert found.e2e_ms.mean / 1000 == pytest.approx(mean(end_s[at] - arrived[at] for at in arrived), rel=0.12)
    assert found.ttft_ms.mean / 1000 == pytest.approx(mean(first_s[at] - arrived[at] for at in arrived), rel=0.1)

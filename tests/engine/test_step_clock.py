"""A rehearsal gives each step the time of another machine: it waits, and counts the steps that are slower here."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams
from mars_ray.engine.stats.engine_stats import StepClock
from mars_ray.engine.stats.state import ModelledSteps, notice_of
from mars_ray.engine.stats.step_time import FIRST_FIT, StepWork
from mars_ray.errors import ConfigError
from mars_ray.machines.registry import step_model
from mars_ray.model.checkpoint import Checkpoint
from tests.control.control_samples import engine_state
from tests.factories.engine import Prompts, engine_of, request, run

MACHINE = "h200/qwen2.5-7b/vllm"
MODEL = step_model(MACHINE)
WORK = StepWork(num_seqs=2, positions=8, kv_tokens=300, prompt_tokens=64, masks=4)


STEP_S = WORK.modelled_s(MODEL)


@dataclass
class Time:
    """A clock that only its own `sleep` moves, and tests."""

    now_s: float = 100.0
    late_s: float = 0.0
    """Time by which each sleep lasts too long."""
    waits_s: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.now_s += seconds + self.late_s


def modelled(time: Time) -> StepClock:
    return StepClock(time.clock, MODEL, time.sleep)


def forward(stepping: StepClock, time: Time, own_s: float = 0.0, work: StepWork = WORK) -> None:
    """Run a forward that takes `own_s` here."""
    stepping.begin()
    time.now_s += own_s
    stepping.forwarded(work)


def test_a_step_that_is_faster_here_waits_for_the_rest_of_its_time() -> None:
    time = Time()
    stepping = modelled(time)
    began_s = time.now_s
    forward(stepping, time, STEP_S / 4)
    assert time.waits_s == [pytest.approx(STEP_S * 3 / 4)]
    assert time.now_s == pytest.approx(began_s + STEP_S)
    assert stepping.modelled == ModelledSteps(name=MACHINE, slow_steps=0)


def test_a_step_that_is_slower_here_is_counted_and_the_next_one_has_its_whole_time() -> None:
    time = Time()
    stepping = modelled(time)
    forward(stepping, time, 2 * STEP_S)
    assert (time.waits_s, stepping.slow_steps) == ([], 1)
    forward(stepping, time)
    assert time.waits_s == [pytest.approx(STEP_S)]
    assert stepping.slow_steps == 1


def test_the_time_between_two_steps_is_part_of_the_next_one() -> None:
    time = Time()
    stepping = modelled(time)
    forward(stepping, time)
    time.now_s += STEP_S / 2  # commit and send tokens
    forward(stepping, time)
    assert time.now_s == pytest.approx(100.0 + 2 * STEP_S)


def test_the_time_without_work_is_no_part_of_a_step() -> None:
    time = Time()
    stepping = modelled(time)
    forward(stepping, time)
    stepping.idle()
    time.now_s += 60.0
    forward(stepping, time)
    assert time.waits_s == [pytest.approx(STEP_S)] * 2
    assert stepping.slow_steps == 0


def test_late_wake_ups_do_not_add_up() -> None:
    time = Time(late_s=STEP_S / 10)
    stepping = modelled(time)
    for _ in range(100):
        forward(stepping, time)
    assert time.now_s == pytest.approx(100.0 + 100 * STEP_S + time.late_s)
    assert stepping.slow_steps == 0


WORKS = st.builds(
    StepWork,
    num_seqs=st.integers(0, 64),
    positions=st.integers(0, 512),
    kv_tokens=st.integers(0, 100_000),
    prompt_tokens=st.integers(0, 512),
)


@given(st.lists(st.tuples(WORKS, st.floats(0, 3)), max_size=20))
def test_every_step_lasts_as_long_as_the_slower_of_the_two_machines(steps: list[tuple[StepWork, float]]) -> None:
    time = Time(now_s=0.0)
    stepping = modelled(time)
    slow_steps = 0
    for work, share in steps:
        began_s = time.now_s
        own_s = share * work.modelled_s(MODEL)
        forward(stepping, time, own_s, work)
        assert time.now_s - began_s == pytest.approx(max(own_s, work.modelled_s(MODEL)))
        slow_steps += share > 1.001
    assert slow_steps <= stepping.slow_steps <= sum(share > 0.999 for _, share in steps)


# In an engine


def rehearsing(bundled: Checkpoint, time: Time, machine: str | None = MACHINE) -> Engine:
    parts = {"clock": time.clock, "sleep": time.sleep}
    return engine_of(bundled, parts, threshold=1.0, max_num_seqs=4, rehearse=machine)


def test_the_step_times_that_an_engine_measures_are_the_modelled_ones(bundled: Checkpoint, prompts: Prompts) -> None:
    time = Time()
    engine = rehearsing(bundled, time)
    decode = DecodeParams(mode=Mode.AR)
    run(engine, [request(0, prompts[0][:16], decode, max_tokens=2 * FIRST_FIT, ignore_eos=True)])
    fitted = engine.step_time.model
    assert fitted is not None
    work = StepWork(num_seqs=1, positions=1, kv_tokens=30)
    assert fitted.seconds(work) == pytest.approx(work.modelled_s(MODEL), rel=0.01)
    assert engine.state().modelled == ModelledSteps(name=MACHINE, slow_steps=0)
    assert len(time.waits_s) == engine.state().steps == 2 * FIRST_FIT


def test_latencies_include_the_wait(bundled: Checkpoint, prompts: Prompts) -> None:
    time = Time()
    engine = rehearsing(bundled, time)
    engine.add(request(0, prompts[0][:16], DecodeParams(mode=Mode.AR), max_tokens=2, ignore_eos=True))
    engine.step()
    assert engine.state().ttft_p95_s == pytest.approx(time.waits_s[0])
    engine.step()
    assert engine.state().tpot_p95_s == pytest.approx(time.waits_s[1])


def test_an_engine_answers_in_a_rehearsal_as_without_one(bundled: Checkpoint, prompts: Prompts) -> None:
    requests = [request(number, prompt, max_tokens=12) for number, prompt in enumerate(prompts[:6])]
    answers = [
        {name: output.tokens for name, output in run(rehearsing(bundled, Time(), machine), requests).items()}
        for machine in (MACHINE, None)
    ]
    assert answers[0] == answers[1]


def test_an_engine_without_a_rehearsal_never_waits(bundled: Checkpoint, prompts: Prompts) -> None:
    time = Time()
    engine = rehearsing(bundled, time, machine=None)
    run(engine, [request(0, prompts[0], max_tokens=4)])
    assert (time.waits_s, engine.state().modelled) == ([], None)


# Names


def test_an_unknown_machine_is_refused_with_the_known_ones(bundled: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"h300/qwen2\.5-7b.*h200"):
        rehearsing(bundled, Time(), "h300/qwen2.5-7b")


def test_a_name_stays_and_a_missing_file_is_refused_by_its_name() -> None:
    assert EngineOptions(rehearse=MACHINE).rehearse == MACHINE
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        EngineOptions(rehearse=str(Path("nowhere.yaml")))


def test_slow_steps_are_told_as_a_share_of_the_steps_on_each_machine() -> None:
    states = [
        engine_state(steps=1000, modelled=ModelledSteps(name=MACHINE, slow_steps=2)),
        engine_state(steps=500, modelled=ModelledSteps(name=MACHINE, slow_steps=1)),
        engine_state(steps=7, modelled=ModelledSteps(name="mine", slow_steps=0)),
        engine_state(steps=9),
    ]
    assert notice_of(states) == (
        f"modelled step time: {MACHINE} (3 of 1,500 steps were slower here); "
        "modelled step time: mine (0 of 7 steps were slower here)"
    )
    assert notice_of([engine_state()]) == ""

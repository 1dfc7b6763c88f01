"""Classes of service in an engine: thresholds, slots, figures."""

from collections.abc import Callable
from typing import Any

import pytest

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, Request
from mars_ray.engine.service_class import ServiceClass
from mars_ray.engine.stats.engine_stats import WINDOW_S
from mars_ray.engine.stats.state import ClassState
from mars_ray.errors import ConfigError, QueueFullError, RequestError
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import MakeEngine, Output, Prompts, engine_of, request, run

CLASSES = (ServiceClass(name="gold"), ServiceClass(name="batch"))
BLOCK = DecodeParams(block=8)


def thresholds(output: Output) -> set[float]:
    return {chunk.threshold for chunk in output.chunks if chunk.tokens}


def asked(name: str, prompt: tuple[int, ...], decode: DecodeParams = BLOCK, **sampling: Any) -> Request:
    """A request whose class its name begins with."""
    return request(name, prompt, decode, service_class=name.split("-")[0], **sampling)


def figures(engine: Engine) -> dict[str, ClassState]:
    return {each.name: each for each in engine.state().classes}


def test_a_threshold_set_for_a_class_reaches_the_chunks_of_that_class_only(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(classes=CLASSES, threshold=0.9)
    engine.set_thresholds({"batch": 0.5})
    assert {name: each.threshold for name, each in figures(engine).items()} == {"gold": 0.9, "batch": 0.5}
    outputs = run(engine, [asked("gold", prompts[0], max_tokens=12), asked("batch", prompts[70], max_tokens=12)])
    assert (thresholds(outputs["gold"]), thresholds(outputs["batch"])) == ({0.9}, {0.5})


def test_a_threshold_set_between_steps_holds_for_what_runs(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(classes=CLASSES, threshold=0.9)

    def change(step: int) -> None:
        if step == 2:
            engine.set_thresholds({"gold": 1.0})

    outputs = run(
        engine, [asked(name, prompts[0], max_tokens=40, ignore_eos=True) for name in ("gold", "batch")], change
    )
    gold = [chunk.threshold for chunk in outputs["gold"].chunks if chunk.tokens]
    assert gold == [0.9] * gold.count(0.9) + [1.0] * gold.count(1.0) and 1.0 in gold and 0.9 in gold
    assert thresholds(outputs["batch"]) == {0.9}


@pytest.mark.parametrize(
    ("decode", "in_force"),
    [
        (DecodeParams(threshold=0.8, block=8), 0.8),
        (DecodeParams(threshold=0.3, block=8), 0.3),
        (DecodeParams(floor=0.8, block=8), 0.8),
        (DecodeParams(floor=0.3, block=8), 0.5),
    ],
    ids=str,
)
def test_a_threshold_of_the_request_wins_and_so_does_a_floor_that_is_higher_than_that_of_its_class(
    make_engine: MakeEngine, prompts: Prompts, decode: DecodeParams, in_force: float
) -> None:
    engine = make_engine(classes=CLASSES, threshold=0.9)
    engine.set_thresholds({"batch": 0.5})
    outputs = run(engine, [asked("batch", prompts[0], decode, max_tokens=12)])
    assert thresholds(outputs["batch"]) == {in_force}


def test_a_request_of_an_unknown_class_is_refused_and_told_the_known_ones(make_engine: MakeEngine) -> None:
    engine = make_engine(classes=CLASSES)
    for each in (asked("silver", (5,)), request("nameless", (5,))):
        with pytest.raises(RequestError, match=f"service_class is '{each.service_class}'.* gold, batch"):
            engine.add(each)
    assert not engine.busy
    assert all((each.arrived, each.prompt_tokens) == (0, 0) for each in figures(engine).values())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"silver": 0.5}, "no class 'silver'; there are gold, batch"),
        ({"batch": 1.7}, "threshold is 1.7"),
        ({"batch": -0.1}, "threshold is -0.1"),
        ({"batch": float("nan")}, "threshold is nan"),
    ],
    ids=str,
)
def test_thresholds_of_which_one_is_wrong_change_nothing(
    make_engine: MakeEngine, wrong: dict[str, float], said: str
) -> None:
    engine = make_engine(classes=CLASSES, threshold=0.9)
    with pytest.raises(ConfigError, match=said):
        engine.set_thresholds({"gold": 0.5} | wrong)
    assert {each.threshold for each in engine.state().classes} == {0.9}
    assert engine.state().threshold_changes == 0


def test_only_a_threshold_that_becomes_another_is_a_change(make_engine: MakeEngine) -> None:
    engine = make_engine(classes=CLASSES, threshold=0.9)
    engine.set_thresholds({"gold": 0.9, "batch": 0.8})
    engine.set_thresholds({"batch": 0.8})
    engine.set_thresholds({})
    assert engine.state().threshold_changes == 1


@pytest.mark.parametrize("classes", [(), (ServiceClass(name="gold"), ServiceClass(name="gold"))], ids=["none", "twice"])
def test_an_engine_without_classes_or_with_two_of_one_name_does_not_start(
    make_engine: MakeEngine, classes: tuple[ServiceClass, ...]
) -> None:
    with pytest.raises(ConfigError, match="the classes of service are"):
        make_engine(classes=classes)


def test_a_class_does_not_wait_for_the_flood_of_another_and_neither_changes_what_the_other_says(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    decode = DecodeParams(mode=Mode.AR)
    engine = make_engine(classes=CLASSES, max_num_seqs=2)
    flood = [asked(f"batch-{n}", prompts[n * 60], decode, max_tokens=24, ignore_eos=True) for n in range(4)]
    late = asked("gold", prompts[300], decode, max_tokens=24, ignore_eos=True)

    def arrive(step: int) -> None:
        if step == 6:
            assert engine.running == 2
            engine.add(late)

    outputs = run(engine, flood, arrive)
    for each in (*flood, late):
        alone = run(make_engine(classes=CLASSES), [each])[each.id]
        assert outputs[each.id].tokens == alone.tokens
        assert outputs[each.id].text == alone.text
    assert outputs["gold"].finished.queued_s < outputs["batch-3"].finished.queued_s, "it did not wait for them all"


def test_the_state_counts_what_came_and_ended_by_class(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(classes=CLASSES, max_num_seqs=2, max_waiting_seqs=8)
    requests = [asked(f"gold-{n}", prompts[n], max_tokens=5, ignore_eos=True) for n in range(2)]
    several = asked("batch", prompts[9], n=3, max_tokens=7, ignore_eos=True)
    for each in (*requests, several):
        engine.add(each)
    before = figures(engine)
    assert {name: (each.running, each.waiting) for name, each in before.items()} == {"gold": (0, 2), "batch": (0, 3)}
    assert {name: (each.arrived, each.prompt_tokens) for name, each in before.items()} == {
        "gold": (2, len(prompts[0]) + len(prompts[1])),
        "batch": (3, len(prompts[9])),
    }
    run(engine, [])
    after = figures(engine)
    assert {name: (each.arrived, each.ended, each.tokens) for name, each in after.items()} == {
        "gold": (2, 2, 10),
        "batch": (3, 3, 21),
    }
    assert (engine.state().running, engine.state().waiting) == (0, 0)


def test_who_is_refused_for_a_full_queue_has_arrived_and_who_leaves_before_it_ran_has_not_ended(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(classes=CLASSES, max_waiting_seqs=4)
    engine.add(asked("batch", prompts[0], n=2))
    with pytest.raises(QueueFullError):
        engine.add(asked("batch-more", prompts[1]))
    engine.add(asked("gold", prompts[2]))
    engine.cancel("batch")
    state = figures(engine)
    assert (state["batch"].arrived, state["batch"].ended, state["batch"].waiting) == (3, 0, 0)
    assert (state["gold"].arrived, state["gold"].waiting) == (1, 1)


def test_a_refused_request_is_tried_again_only_once_fewer_wait(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(classes=CLASSES, max_waiting_seqs=2, max_num_seqs=4)
    one_token = DecodeParams(mode=Mode.AR)
    requests = [asked(f"batch-{number}", prompts[0], one_token, max_tokens=24, ignore_eos=True) for number in range(6)]
    steps = sum(1 for _ in run_steps(engine, requests))
    state = figures(engine)["batch"]
    assert state.ended == len(requests)
    assert state.arrived <= 2 * len(requests) < steps


def test_latencies_are_those_of_the_clock_and_forgotten_after_a_while(bundled: Checkpoint, prompts: Prompts) -> None:
    now_s = 100.0
    clock: Callable[[], float] = lambda: now_s  # noqa: E731
    engine = engine_of(bundled, {"clock": clock}, classes=CLASSES)
    assert (engine.state().ttft_p95_s, engine.state().tpot_p95_s) == (None, None)
    engine.add(asked("gold", prompts[0][:16], DecodeParams(mode=Mode.AR), max_tokens=3, ignore_eos=True))
    now_s = 102.0
    engine.step()
    assert (engine.state().ttft_p95_s, engine.state().tpot_p95_s) == (2.0, None)
    now_s = 102.5
    engine.step()
    assert engine.state().tpot_p95_s is None, "nothing ended yet"
    now_s = 103.5
    engine.step()
    assert not engine.busy
    assert engine.state().tpot_p95_s == 0.75, "two tokens after the first took 1.5 s"
    now_s = 102.0 + WINDOW_S + 0.1
    assert (engine.state().ttft_p95_s, engine.state().tpot_p95_s) == (None, 0.75)
    now_s = 103.5 + WINDOW_S + 0.1
    assert engine.state().tpot_p95_s is None


def test_latencies_of_batches_do_not_count_beside_callers(bundled: Checkpoint, prompts: Prompts) -> None:
    for classes, expected in ((CLASSES, None), ((ServiceClass(name="batch"),), 0.0)):
        engine = engine_of(bundled, {"clock": lambda: 100.0}, classes=classes)
        run(engine, [asked("batch", prompts[0][:16], max_tokens=3, ignore_eos=True)])
        assert (engine.state().ttft_p95_s, engine.state().tpot_p95_s) == (expected, expected)


def test_prompt_tokens_from_the_cache_are_counted_apart(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(classes=CLASSES)
    for expected in (0, len(prompts[0]) - 1):
        run(engine, [asked("gold", prompts[0], max_tokens=3)])
        assert figures(engine)["gold"].cached_tokens == expected

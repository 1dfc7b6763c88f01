"""An alarm for masks whose tokens are no longer right: it is raised, switches masks off, and ends when they recover."""

import logging
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.adapter.folder import Adapter
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, Request
from mars_ray.engine.stats.acceptance_watch import (
    FIRST_REST_TOKENS,
    LONGEST_REST_TOKENS,
    TRIAL,
    TRIAL_TOKENS,
    WINDOW,
    AcceptanceWatch,
)
from mars_ray.engine.stats.state import SourceAcceptance, warnings_of
from mars_ray.method.metric import Metric
from mars_ray.model.checkpoint import Checkpoint
from tests.engine.test_adapter import some_adapter
from tests.factories.cards import adapter_card
from tests.factories.engine import MakeEngine, bundled_checkpoint, engine_of, request, run

GOOD, BAD = [(0.8, True)] * 4 + [(0.8, False)], [(0.8, False)]
TOKENS_PER_FORWARD = 5.0
"""A forward gains 5 tokens if each prediction is right with probability 0.8."""
EXACT, AR = DecodeParams(mode=Mode.EXACT), DecodeParams(mode=Mode.AR)
AHEAD = DecodeParams(mode=Mode.EXACT, block=4)
"""Masks in every step, whatever they gain."""


def watch(tokens_per_forward: float | None = TOKENS_PER_FORWARD) -> AcceptanceWatch:
    return AcceptanceWatch("masks", tokens_per_forward)


def observe(watched: AcceptanceWatch, predictions: list[tuple[float, bool]], number: int) -> None:
    for index in range(number):
        watched.observe(*predictions[index % len(predictions)])


def latest(watched: AcceptanceWatch) -> SourceAcceptance:
    state = watched.state()
    assert state is not None
    return state


def collapsed() -> AcceptanceWatch:
    watched = watch()
    observe(watched, BAD, WINDOW)
    return watched


def rest_of(watched: AcceptanceWatch) -> int:
    """Return the number of tokens until the trial, which begins."""
    tokens = 0
    while watched.off:
        watched.generated(512)
        tokens += 512
    return tokens


def test_a_window_of_mostly_wrong_predictions_raises_the_alarm_once(caplog: pytest.LogCaptureFixture) -> None:
    watched, poor = watch(), [(0.8, True)] * 3 + BAD * 7
    with caplog.at_level(logging.WARNING):
        observe(watched, poor, WINDOW - 1)
        assert not watched.off and latest(watched).alarm == 0
        observe(watched, BAD, 10 * WINDOW)
    assert watched.off
    assert latest(watched) == SourceAcceptance("masks", acceptance=0.3, expected=0.8, alarm=1)
    [record] = caplog.records
    assert "masks are off: 30% of the latest predictions were right, 80% are expected" in record.getMessage()


def test_predictions_that_are_never_right_raise_the_alarm_before_the_window_is_full() -> None:
    watched = watch()
    observe(watched, BAD, TRIAL - 1)
    assert not watched.off
    observe(watched, BAD, 1)
    assert watched.off


@pytest.mark.parametrize(("right", "alarm"), [(0.45, 0), (0.35, 1)])
def test_the_bound_is_half_of_the_acceptance_that_the_card_promises(right: float, alarm: int) -> None:
    watched = watch()
    observe(watched, [(0.9, index < 20 * right) for index in range(20)], WINDOW)
    assert latest(watched).alarm == alarm


@pytest.mark.parametrize(("right", "alarm"), [(0.25, 0), (0.15, 1)])
def test_unlikely_predictions_lower_what_is_expected(right: float, alarm: int) -> None:
    watched = watch()
    observe(watched, [(0.4, index < 20 * right) for index in range(20)], WINDOW)
    assert latest(watched).alarm == alarm
    assert latest(watched).expected == pytest.approx(0.4)


@pytest.mark.parametrize("probability", [0.001, float("nan")])
def test_predictions_that_are_all_unlikely_are_a_collapse_unless_no_card_promises_more(probability: float) -> None:
    with_card, without = watch(), watch(None)
    for watched in (with_card, without):
        observe(watched, [(probability, False)], WINDOW)
    assert latest(with_card).alarm == 1
    assert latest(without).alarm == 0


@given(st.floats(0.0, 1.0), st.floats(1.0, 20.0) | st.none(), st.integers(0, 2**32))
def test_predictions_as_right_as_they_are_likely_raise_no_alarm_and_good_values_for_reports(
    probability: float, tokens_per_forward: float | None, seed: int
) -> None:
    source, watched = random.Random(seed), watch(tokens_per_forward)
    promised = 1 - 1 / (tokens_per_forward or 1.0)
    for _ in range(3 * WINDOW):
        likely = max(probability, 0.3 * promised + 0.3)
        watched.observe(likely, source.random() < likely)
    state = latest(watched)
    assert state.alarm == 0
    assert 0 <= state.acceptance <= 1 and 0 <= state.expected <= 1


def test_a_trial_that_fails_doubles_the_rest_up_to_a_limit() -> None:
    watched = collapsed()
    rests = []
    for _ in range(12):
        rests.append(rest_of(watched))
        assert watched.on_trial
        observe(watched, BAD, TRIAL)
        assert watched.off and latest(watched).alarm == 1
    assert rests == [min(FIRST_REST_TOKENS << number, LONGEST_REST_TOKENS) for number in range(12)]


def test_a_trial_in_which_nothing_is_verified_ends() -> None:
    watched = collapsed()
    rest_of(watched)
    watched.generated(TRIAL_TOKENS)
    assert watched.off and latest(watched).alarm == 1
    assert rest_of(watched) == 2 * FIRST_REST_TOKENS


def test_a_trial_that_succeeds_ends_the_alarm_and_later_collapses_rest_as_the_first_one() -> None:
    watched = collapsed()
    rest_of(watched)
    observe(watched, BAD, TRIAL)
    rest_of(watched)
    ended = [watched.observe(*GOOD[number % 5]) for number in range(TRIAL)]
    assert ended == [False] * (TRIAL - 1) + [True]
    assert not watched.off and not watched.on_trial and latest(watched).alarm == 0
    observe(watched, BAD, WINDOW)
    assert rest_of(watched) == FIRST_REST_TOKENS


def test_a_warning_counts_the_engines_and_shows_the_worst_figures(make_engine: MakeEngine) -> None:
    state = make_engine().state()
    states = [
        replace(state, acceptance=(SourceAcceptance("masks", acceptance, 0.8, alarm),))
        for acceptance, alarm in ((0.7, 0), (0.2, 1), (0.1, 1))
    ]
    assert warnings_of(states[:1]) == ()
    assert warnings_of(states) == (
        "masks are off in 2 engines: 10% of the latest predictions were right, 80% are expected",
    )


@pytest.fixture(scope="module")
def adapters(bundled: Checkpoint) -> dict[str | None, Adapter]:
    """A good adapter, which changes nothing because the bundled model knows masks, and one with random factors."""
    assert bundled.card is not None
    card = adapter_card(block=bundled.card.block, calibration=bundled.card.calibration)
    return {name: replace(some_adapter(bundled, std=std), card=card) for name, std in (("good", 0.0), ("bad", 0.3))}


def make_adapted(adapters: dict[str | None, Adapter]) -> Engine:
    return engine_of(bundled_checkpoint(), {"adapters": adapters}, max_num_seqs=16)


def asked(prompts: list[tuple[int, ...]], decode: DecodeParams, **sampling: Any) -> list[Request]:
    return [request(number, prompt, decode, **({"max_tokens": 24} | sampling)) for number, prompt in enumerate(prompts)]


def alarms(engine: Engine) -> dict[str, int]:
    return {state.source: state.alarm for state in engine.state().acceptance}


def test_a_bad_adapter_raises_the_alarm_and_is_off_while_answers_stay_right(
    adapters: dict[str | None, Adapter], prompts: list[tuple[int, ...]]
) -> None:
    engine = make_adapted(adapters)
    chosen = prompts[::12]
    expected = {name: output.tokens for name, output in run(engine, asked(chosen, AR)).items()}
    bad = replace(AHEAD, adapter="bad")
    for _ in range(9):
        outputs = run(engine, asked(chosen, bad))
        assert {name: output.tokens for name, output in outputs.items()} == expected
        if alarms(engine)["masks of bad"]:
            break
    [state] = engine.state().acceptance
    assert state.alarm and state.acceptance < 0.1 and state.expected > 0.7
    outputs = run(engine, asked(chosen[:8], bad))
    assert {name: output.tokens for name, output in outputs.items()} == {str(n): expected[str(n)] for n in range(8)}
    assert not any(chunk.masks for output in outputs.values() for chunk in output.chunks), "as in mode ar"
    assert engine.profile.points()[0].tokens_per_forward > 3, "as on the card, for the other adapter"
    good = run(engine, asked(chosen[:8], replace(AHEAD, adapter="good")))
    assert any(chunk.masks for output in good.values() for chunk in output.chunks), "another adapter is on"
    assert alarms(engine)["masks of good"] == 0


@pytest.mark.parametrize(("temperature", "threshold"), [(0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (0.0, 0.3)])
def test_the_bundled_model_raises_no_alarm_on_its_prompts_or_the_hardest_of_them(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], temperature: float, threshold: float
) -> None:
    engine = make_engine(max_num_seqs=16)
    for part in (prompts[::12], prompts[420:462]):  # the last ones are those of the hardest family
        decode = DecodeParams(threshold=threshold, block=4)
        run(engine, asked(part, decode, temperature=temperature, seed=1))
        [state] = engine.state().acceptance
        assert not state.alarm, state.figures


def test_masks_that_recover_are_on_again_with_the_speed_of_the_card(
    bundled: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    engine = engine_of(bundled, max_num_seqs=4)
    watched = engine._adapters.default.watch
    tokens_per_forward = [point.tokens_per_forward for point in engine.profile.points()]
    for _ in range(2 * WINDOW):
        engine.profile.observe_drafts([0.9] * 4, [0.0])
    observe(watched, BAD, WINDOW)
    outputs = run(engine, asked(prompts[::40], AHEAD))
    assert not any(chunk.masks for output in outputs.values() for chunk in output.chunks)
    watched.generated(FIRST_REST_TOKENS)
    while watched.on_trial:
        run(engine, asked(prompts[::12], EXACT))
    assert alarms(engine) == {"masks": 0}
    outputs = run(engine, asked(prompts[::40], AHEAD))
    assert any(chunk.masks for output in outputs.values() for chunk in output.chunks)
    assert engine.profile.points()[0].tokens_per_forward > 0.5 * tokens_per_forward[0]


def test_reproducible_answers_below_threshold_1_keep_their_masks(
    bundled: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    answers = []
    for off in (False, True):
        engine = engine_of(bundled)
        observe(engine._adapters.default.watch, BAD, WINDOW * off)
        below = DecodeParams(threshold=0.5, block=4)
        answers.append({name: output.tokens for name, output in run(engine, asked(prompts[::60], below)).items()})
    assert answers[0] == answers[1]


@pytest.mark.parametrize("metric", [Metric.PROBABILITY, Metric.MARGIN])
def test_tokens_that_a_threshold_keeps_are_judged_by_the_models_own_choice(
    metric: Metric, adapters: dict[str | None, Adapter], prompts: list[tuple[int, ...]]
) -> None:
    engine = make_adapted(adapters)
    keep_all = DecodeParams(threshold=0.0, metric=metric, block=2, adapter="bad")
    for _ in range(99):
        run(engine, asked(prompts[::12], keep_all, ignore_eos=True))
        if alarms(engine).get("masks of bad"):
            return
    pytest.fail("no alarm")

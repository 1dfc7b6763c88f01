"""Drafts from text change no answer, whatever the mode, and come only from the sequence's own text and its owner's."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, Request
from mars_ray.engine.sampling.draft_choice import DraftChoice
from tests.factories.engine import MakeEngine, Output, request, run

EXACT, AR = DecodeParams(mode=Mode.EXACT), DecodeParams(mode=Mode.AR)


@pytest.fixture(scope="module")
def twice(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Prompts that hold a question with its answer, and the question again."""
    return [(*prompt, *prompt[5:]) for prompt in prompts[::40]]


def right(engine: Engine) -> int:
    """Return the number of right drafts from text."""
    return sum(counts.right for counts in engine.state().drafts if counts.source == "text")


def plain(make_engine: MakeEngine, asked: list[Request]) -> dict[str, Output]:
    """Answer requests one token at a time."""
    return run(
        make_engine(),
        [request(each.id, each.prompt, AR, **vars_of(each)) for each in asked],
    )


def vars_of(asked: Request) -> dict[str, Any]:
    sampling = asked.sampling
    return {name: getattr(sampling, name) for name in type(sampling).__dataclass_fields__}


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"frequency_penalty": 0.4},
    {"logprobs": 2},
    {"n": 2, "temperature": 1.0, "seed": 9},
]


@given(which=st.lists(st.integers(0, 12), min_size=1, max_size=5), sampling=st.sampled_from(SAMPLINGS))
def test_exact_answers_are_those_of_one_token_at_a_time(
    which: list[int], sampling: dict[str, Any], make_engine: MakeEngine, twice: list[tuple[int, ...]]
) -> None:
    asked = [request(number, twice[index], EXACT, max_tokens=24, **sampling) for number, index in enumerate(which)]
    engine = make_engine(max_num_seqs=3)
    for _ in range(2):  # the second time, recent answers draft
        outputs = run(engine, asked)
        expected = plain(make_engine, asked)
        assert {name: output.tokens for name, output in outputs.items()} == {
            name: output.tokens for name, output in expected.items()
        }
        assert {name: output.finished.reason for name, output in outputs.items()} == {
            name: output.finished.reason for name, output in expected.items()
        }


def test_text_that_repeats_takes_fewer_forwards(
    make_engine: MakeEngine, twice: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    asked = [request(number, prompt, EXACT, max_tokens=40) for number, prompt in enumerate(twice)]
    run(engine, asked)
    again = run(engine, asked)
    assert right(engine) > 0
    monkeypatch.setattr(DraftChoice, "choose", lambda *_: None)
    without = run(make_engine(), asked)
    forwards = [sum(each.finished.forwards for each in outputs.values()) for outputs in (again, without)]
    assert forwards[0] < 0.7 * forwards[1]


@pytest.mark.parametrize("block", [1, 4])
def test_the_profile_knows_what_text_gains(block: int, make_engine: MakeEngine, twice: list[tuple[int, ...]]) -> None:
    engine, decode = make_engine(), DecodeParams(mode=Mode.EXACT, block=block)
    outputs = run(engine, [request(number, prompt, decode, max_tokens=40) for number, prompt in enumerate(twice * 3)])
    tokens = sum(len(output.tokens) for output in outputs.values())
    forwards = sum(output.finished.forwards for output in outputs.values())
    assert engine.state().profile[0].tokens[block - 1] == pytest.approx(tokens / forwards, rel=0.15)
    assert right(engine) > 0


def test_a_recent_answer_drafts_for_its_owner_and_for_no_other(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    def asked(name: str, tenant: str) -> Request:
        return Request(
            id=name, prompt=prompts[100], tenant=tenant, decode=EXACT, sampling=request(0, [1], max_tokens=40).sampling
        )

    engine = make_engine()
    run(engine, [asked("first", "ada")])
    before = right(engine)
    run(engine, [asked("other", "bob")])
    between = right(engine)
    run(engine, [asked("again", "ada")])
    assert between - before <= before
    assert right(engine) - between > between - before


def test_one_token_at_a_time_gets_no_drafts(make_engine: MakeEngine, twice: list[tuple[int, ...]]) -> None:
    engine = make_engine()
    outputs = run(engine, [request(number, prompt, AR, max_tokens=24) for number, prompt in enumerate(twice)])
    assert "text" not in [counts.source for counts in engine.state().drafts]
    assert all(each.finished.forwards == len(each.tokens) for each in outputs.values())


def test_reproducible_answers_below_threshold_1_do_not_depend_on_recent_answers(
    make_engine: MakeEngine, twice: list[tuple[int, ...]]
) -> None:
    engine = make_engine()
    below = DecodeParams(threshold=0.5)
    asked = [request(number, prompt, below, max_tokens=24, seed=1) for number, prompt in enumerate(twice)]
    first, second = run(engine, asked), run(engine, asked)
    assert [first[name].tokens for name in first] == [second[name].tokens for name in first]
    assert "text" not in [counts.source for counts in engine.state().drafts]

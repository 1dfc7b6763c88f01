"""Masks behind every draft: answers stay those of one token at a time, and a wrong draft voids no masks."""

from typing import Any

import pytest

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.engine.stats.block_choice import BlockChoice
from tests.engine.grammar_samples import regex
from tests.engine_samples import MakeEngine, Output, request, run

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "with penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    "within a grammar": {"grammar": regex(r"([a-z]+ ){3}[a-z]+\.?")},
    "with a grammar, sampled": {"grammar": regex(r"[a-z ,.]{5,40}"), "temperature": 1.0, "seed": 5},
    "no stop before 20 tokens": {"min_tokens": 20},
    "log-probabilities": {"logprobs": 2},
}


@pytest.fixture(params=["kernels", "torch"])
def make(request: pytest.FixtureRequest, make_engine: MakeEngine, make_torch_engine: MakeEngine) -> MakeEngine:
    return make_engine if request.param == "kernels" else make_torch_engine


def answer(
    engine: Engine, prompts: list[tuple[int, ...]], mode: Mode, block: int | None, **sampling: Any
) -> list[Output]:
    decode = DecodeParams(mode=mode, block=block)
    asked = [request(number, prompt, decode, max_tokens=40, **sampling) for number, prompt in enumerate(prompts)]
    said = run(engine, asked)
    return [said[str(number)] for number in range(len(prompts))]


@pytest.fixture
def every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks always stand behind every draft, whatever costs say."""
    monkeypatch.setattr(BlockChoice, "_choose", lambda *_: None)
    monkeypatch.setattr(BlockChoice, "behind_every_draft", property(lambda _: True, lambda *_: None), raising=False)


@pytest.mark.usefixtures("every_draft")
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_one_token_at_a_time(make: MakeEngine, prompts: list[tuple[int, ...]], way: str) -> None:
    chosen = prompts[::42]
    alone = answer(make(), chosen, Mode.AR, None, **WAYS[way])
    ahead = answer(make(), chosen, Mode.EXACT, 5, **WAYS[way])
    assert [each.tokens for each in ahead] == [each.tokens for each in alone]
    assert sum(each.finished.forwards for each in ahead) < sum(each.finished.forwards for each in alone)


def test_a_wrong_draft_voids_no_masks(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], request: pytest.FixtureRequest
) -> None:
    chosen = prompts[::12]
    linear = answer(make_engine(), chosen, Mode.EXACT, 6, temperature=1.0, seed=1)
    request.getfixturevalue("every_draft")
    rows = answer(make_engine(), chosen, Mode.EXACT, 6, temperature=1.0, seed=1)
    assert [each.tokens for each in rows] == [each.tokens for each in linear]
    assert sum(each.finished.forwards for each in rows) < sum(each.finished.forwards for each in linear)


@pytest.mark.usefixtures("every_draft")
def test_at_the_end_of_the_context_masks_stand_behind_the_last_draft_alone(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    engine = make_engine(max_kv_tokens=128)
    long = prompts[0] * 10
    room = engine.limits.max_model_len - len(long[: engine.limits.max_model_len - 20])
    prompt = long[: engine.limits.max_model_len - 20]
    decode = DecodeParams(mode=Mode.EXACT, block=8)
    said = run(engine, [request("0", prompt, decode, max_tokens=room, ignore_eos=True)])["0"]
    assert len(said.tokens) == room

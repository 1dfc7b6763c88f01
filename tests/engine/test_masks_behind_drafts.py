"""Masks behind every draft: worth their positions, and answers stay those of one token at a time."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.engine.stats import block_choice
from mars_ray.engine.stats.block_choice import BlockChoice
from mars_ray.method.drafts import PositionPrice, masks_behind_drafts
from tests.engine.grammar_samples import regex
from tests.factories.engine import MakeEngine, Output, request, run

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "with penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    "within a grammar": {"grammar": regex(r"([a-z]+ ){3}[a-z]+\.?")},
    "with a grammar, sampled": {"grammar": regex(r"[a-z ,.]{5,40}"), "temperature": 1.0, "seed": 5},
    "no stop before 20 tokens": {"min_tokens": 20},
    "log-probabilities": {"logprobs": 2},
}
SHARES = st.lists(st.floats(0, 1), max_size=6)


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


def at_price(engine: Engine, price: float) -> Engine:
    """Positions cost so many tokens, whatever step times say."""
    engine._blocks._price = PositionPrice(price)
    return engine


@pytest.fixture
def fixed_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockChoice, "_choose", lambda *_: None)


@given(SHARES, SHARES, st.floats(0.001, 1), st.data())
def test_a_mask_stands_where_the_chance_that_it_is_read_is_worth_it(
    confidences: list[float], worth: list[float], price: float, data: st.DataObject
) -> None:
    worth = sorted(worth, reverse=True)
    most = data.draw(st.lists(st.integers(0, 8), min_size=len(confidences) + 1, max_size=len(confidences) + 1))
    rows = masks_behind_drafts(confidences, worth, PositionPrice(price), most)
    for right, (count, limit) in enumerate(zip(rows, most, strict=True)):
        chance = 1 - confidences[right] if right < len(confidences) else 1.0
        for each in confidences[:right]:
            chance *= each
        paid = [chance * each >= price for each in worth[:limit]]
        # To within rounding: the chance is a difference there and a product here.
        near = any(abs(chance * each - price) < 1e-9 for each in worth[:limit])
        assert count == sum(paid) or near


@given(SHARES, SHARES, st.floats(0.02, 1), st.integers(0, 20), st.floats(0.01, 1))
def test_masks_fill_the_cheap_positions_with_what_gains_the_most(
    confidences: list[float], worth: list[float], tokens: float, cheap: int, cheap_part: float
) -> None:
    worth = sorted(worth, reverse=True)
    most = [8] * (len(confidences) + 1)
    price = PositionPrice(tokens, cheap, cheap_part * tokens)
    rows = masks_behind_drafts(confidences, worth, price, most)
    right = [math.prod(confidences[:count]) for count in range(len(most))]
    read = [*(one - other for one, other in pairwise(right)), right[-1]]
    gains = sorted((chance * each for chance in read for each in worth), reverse=True)
    placed = sorted((chance * each for chance, count in zip(read, rows, strict=True) for each in worth[:count]))
    paid = [gain >= price.of_position(len(confidences) + at) for at, gain in enumerate(gains)]
    assert placed[::-1] == pytest.approx(gains[: [*paid, False].index(False)])


def test_sure_drafts_leave_no_masks_to_the_rows_before_them_and_unsure_ones_do() -> None:
    assert masks_behind_drafts([0.99, 0.99], [0.5, 0.3, 0.1], PositionPrice(0.05), [9, 9, 9]) == (0, 0, 3)
    assert masks_behind_drafts([0.6], [0.5, 0.3, 0.1], PositionPrice(0.05), [9, 9]) == (2, 3)
    assert masks_behind_drafts([0.6], [0.5, 0.3, 0.1], PositionPrice(0.001), [9, 1]) == (3, 1)


@pytest.mark.usefixtures("fixed_price")
@pytest.mark.parametrize("price", [0.001, 0.2])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_one_token_at_a_time(
    make: MakeEngine, prompts: list[tuple[int, ...]], way: str, price: float
) -> None:
    chosen = prompts[::42]
    alone = answer(make(), chosen, Mode.AR, None, **WAYS[way])
    ahead = answer(at_price(make(), price), chosen, Mode.EXACT, 5, **WAYS[way])
    assert [each.tokens for each in ahead] == [each.tokens for each in alone]
    assert sum(each.finished.forwards for each in ahead) < sum(each.finished.forwards for each in alone)


@pytest.mark.usefixtures("fixed_price")
def test_with_masks_behind_every_draft_a_wrong_one_voids_none(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = prompts[::12]
    rows = answer(at_price(make_engine(), 0.001), chosen, Mode.EXACT, 6, temperature=1.0, seed=1)
    monkeypatch.setattr(block_choice, "masks_behind_drafts", lambda sure, *_: (*(0 for _ in sure), 5))
    line = answer(at_price(make_engine(), 0.001), chosen, Mode.EXACT, 6, temperature=1.0, seed=1)
    assert [each.tokens for each in rows] == [each.tokens for each in line]
    assert sum(each.finished.forwards for each in rows) < sum(each.finished.forwards for each in line)


@pytest.mark.usefixtures("fixed_price")
def test_at_the_end_of_the_context_masks_stand_behind_the_last_draft_alone(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    engine = at_price(make_engine(max_kv_tokens=128), 0.001)
    long = prompts[0] * 10
    prompt = long[: engine.limits.max_model_len - 20]
    room = engine.limits.max_model_len - len(prompt)
    decode = DecodeParams(mode=Mode.EXACT, block=8)
    said = run(engine, [request("0", prompt, decode, max_tokens=room, ignore_eos=True)])["0"]
    assert len(said.tokens) == room

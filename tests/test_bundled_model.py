"""What the card of the bundled model promises."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_ray.data.tasks import FAMILIES
from mars_ray.data.tasks.split import split_of
from mars_ray.engine.request import SamplingParams
from mars_ray.evaluation.calibration import THRESHOLDS, calibration_curve, curve_row, family_prompts
from mars_ray.model.card import read_card
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model

FOLDER = resolve_model("bundled")
CARD = read_card(FOLDER)
assert CARD is not None
CURVE = {point.threshold: point for point in CARD.calibration}


def accuracy_at(threshold: float) -> float:
    accuracy = CURVE[threshold].accuracy
    assert accuracy is not None
    return accuracy


def test_it_is_small_and_opens_with_plain_transformers() -> None:
    network = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert network.num_parameters() <= 8e6
    assert (FOLDER / "model.safetensors").stat().st_size <= 16e6
    assert CARD is not None
    assert AutoTokenizer.from_pretrained(FOLDER).mask_token_id == CARD.mask_token_id


def test_the_card_has_the_whole_curve_of_at_least_200_examples_of_each_family() -> None:
    assert tuple(CURVE) == THRESHOLDS
    for point in CURVE.values():
        assert list(point.by_family) == list(FAMILIES)
        assert all(family.examples >= 200 for family in point.by_family.values())
        assert point.seeds >= 3
        assert None not in (point.tokens_per_forward_std, point.agreement_std, point.accuracy_std)


def test_one_token_at_a_time_it_is_accurate_in_every_family() -> None:
    assert accuracy_at(1.0) >= 0.93
    assert min(family.accuracy for family in CURVE[1.0].by_family.values()) >= 0.80


def test_without_any_loss_it_is_three_times_as_fast() -> None:
    assert CURVE[1.0].tokens_per_forward >= 3.0
    assert CURVE[1.0].agreement == 1.0


def test_at_threshold_095_it_loses_at_most_a_point() -> None:
    assert CURVE[0.95].tokens_per_forward >= 5.0
    assert accuracy_at(0.95) >= accuracy_at(1.0) - 0.01
    assert CURVE[0.95].agreement >= 0.99


def test_there_is_a_trade_off_worth_controlling() -> None:
    at_default = [family.tokens_per_forward for family in CURVE[0.95].by_family.values()]
    assert max(at_default) >= 3 * min(at_default)
    assert accuracy_at(0.5) <= accuracy_at(1.0) - 0.05


def test_the_card_in_words_has_the_figures_of_the_card() -> None:
    text = (FOLDER / "README.md").read_text()
    for point in CURVE.values():
        assert f"| {' | '.join(curve_row(point))} |" in text


def test_the_figures_hold_on_other_examples() -> None:
    checkpoint = load_checkpoint(FOLDER)
    judged = family_prompts(5, range(99, 100))
    for point in calibration_curve(checkpoint, judged, (1.0, 0.95), SamplingParams(), "others"):
        measured = CURVE[point.threshold]
        # 65 examples at 95 %: the standard error is 3 points.
        assert point.accuracy is not None
        assert point.accuracy >= accuracy_at(point.threshold) - 0.1
        assert point.tokens_per_forward == pytest.approx(measured.tokens_per_forward, rel=0.15)
        assert point.agreement >= measured.agreement - 0.02


def test_the_prompts_of_the_demo_are_held_out_and_have_ids_of_their_own() -> None:
    rows = [json.loads(line) for line in (FOLDER.parent / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) >= 200
    assert len({row["id"] for row in rows}) == len(rows)
    assert {split_of(row["prompt"]) for row in rows} == {"heldout"}

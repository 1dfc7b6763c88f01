"""Accuracy and tokens per forward by family, counted on the bundled model."""

from collections import Counter
from collections.abc import Sequence

import pytest

from mars_ray.data.chat import ChatEncoder
from mars_ray.data.tasks import FAMILIES, verify
from mars_ray.data.tasks.family import TaskExample
from mars_ray.data.tasks.split import split_of
from mars_ray.evaluate.families import heldout_examples, measure
from mars_ray.method.reference import DecodeOptions, decode
from mars_ray.model.card import CalibrationPoint
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.progress import ProgressLine


@pytest.fixture(scope="module")
def bundled() -> Checkpoint:
    return load_checkpoint(resolve_model("bundled"))


def measured(bundled: Checkpoint, judged: Sequence[TaskExample], options: DecodeOptions) -> CalibrationPoint:
    with ProgressLine("measure", total=len(judged)) as progress:
        return measure(bundled, judged, options, progress)


def test_the_same_number_of_every_family_is_judged_and_none_was_trained_on() -> None:
    judged = heldout_examples(3, seed=5)
    assert Counter(each.family for each in judged) == dict.fromkeys(FAMILIES, 3)
    assert {split_of(each.prompt) for each in judged} == {"heldout"}


def test_the_figures_are_those_of_the_examples_one_by_one(bundled: Checkpoint) -> None:
    judged = heldout_examples(2, seed=6)
    options = DecodeOptions(threshold=0.8, stop_ids=bundled.stop_ids, max_tokens=64)
    encoder = ChatEncoder(bundled.tokenizer)
    right, tokens, forwards = 0, 0, 0
    for each in judged:
        prompt = encoder.prompt([{"role": "user", "content": each.prompt}])
        (decoded,) = decode(bundled.network, [prompt], options, mask_id=bundled.mask_id)
        text = bundled.tokenizer.decode(decoded.tokens, skip_special_tokens=True)
        right += verify(each.family, each.answer, text)
        tokens, forwards = tokens + len(decoded.tokens), forwards + decoded.forwards
    point = measured(bundled, judged, options)
    assert point.accuracy == pytest.approx(right / len(judged))
    assert point.tokens_per_forward == pytest.approx(tokens / forwards)
    assert list(point.by_family) == list(FAMILIES)
    assert point.examples == len(judged)


def test_one_token_at_a_time_is_one_token_per_forward(bundled: Checkpoint) -> None:
    point = measured(bundled, heldout_examples(1, seed=7), DecodeOptions(mode="ar", max_tokens=64))
    assert (point.threshold, point.tokens_per_forward) == (1.0, 1.0)

"""What a model is judged on."""

from collections import Counter

from mars_ray.data.tasks import FAMILIES
from mars_ray.data.tasks.split import split_of
from mars_ray.evaluation.calibration import heldout_examples


def test_the_same_number_of_every_family_is_judged_and_none_was_trained_on() -> None:
    judged = heldout_examples(3, seed=5)
    assert Counter(each.family for each in judged) == dict.fromkeys(FAMILIES, 3)
    assert {split_of(each.prompt) for each in judged} == {"heldout"}

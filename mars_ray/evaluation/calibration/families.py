"""Held-out examples of the task families, to judge a model by; no training prompt is among them."""

from itertools import islice

from mars_ray.data.tasks import FAMILIES
from mars_ray.data.tasks.family import TaskExample
from mars_ray.data.tasks.split import examples


def heldout_examples(per_family: int, seed: int) -> list[TaskExample]:
    """Return the same number of held-out examples of every family; no training prompt is among them."""
    return [each for family in FAMILIES.values() for each in islice(examples(family, "heldout", seed), per_family)]

"""Task: sort five or six two-digit numbers. Hard to predict ahead, because each position requires comparing all
numbers."""

import random

from mars_ray.data.tasks.checks import same_text
from mars_ray.data.tasks.family import Family, TaskExample

# Each instruction, and True if it asks for the largest number first.
_PROMPTS = (
    ("Sort from smallest to largest: {numbers}", False),
    ("Put these in ascending order: {numbers}", False),
    ("{numbers}. List them with the lowest first.", False),
    ("Sort from largest to smallest: {numbers}", True),
    ("Put these in descending order: {numbers}", True),
    ("{numbers}. List them with the highest first.", True),
)


def _make(rng: random.Random) -> TaskExample:
    numbers = rng.sample(range(10, 100), rng.randint(5, 6))
    prompt, largest_first = rng.choice(_PROMPTS)
    response = ", ".join(map(str, sorted(numbers, reverse=largest_first)))
    return TaskExample(
        family="sort_numbers",
        prompt=prompt.format(numbers=", ".join(map(str, numbers))),
        response=response,
        answer=response,
    )


FAMILY = Family(name="sort_numbers", kind="hard", weight=1.5, make=_make, verify=same_text)

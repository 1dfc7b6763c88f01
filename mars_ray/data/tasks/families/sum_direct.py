"""Task: add two or three small numbers without intermediate steps; the response is only the sum."""

import random

from mars_ray.data.tasks.checks import same_text
from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES, THINGS

_PROMPTS = (
    "{name} counts {things}: {parts}. Reply with the total only.",
    "Stock of {things}: {parts}. Give just the sum.",
    "How many {things} does {name} have? {parts}. Number only.",
    "Add up the {things}: {parts}. Answer with a number.",
)


def _numbers(rng: random.Random) -> list[int]:
    """Return numbers with a sum of at most 99, few enough for a tiny model to learn."""
    kind = rng.random()
    if kind < 0.6:
        first = rng.randint(10, 89)
        return [first, rng.randint(10, 99 - first)]
    if kind < 0.85:
        return rng.sample((rng.randint(10, 90), rng.randint(2, 9)), 2)
    return [rng.randint(2, 9) for _ in range(3)]


def _make(rng: random.Random) -> TaskExample:
    numbers = _numbers(rng)
    cities = rng.sample(CITIES, len(numbers))
    prompt = rng.choice(_PROMPTS).format(
        name=rng.choice(FIRST_NAMES),
        things=rng.choice(THINGS),
        parts=", ".join(f"{number} in {city}" for number, city in zip(numbers, cities, strict=True)),
    )
    response = str(sum(numbers))
    return TaskExample(family="sum_direct", prompt=prompt, response=response, answer=response)


FAMILY = Family(name="sum_direct", kind="hard", weight=2.0, make=_make, verify=same_text)

"""Task: turn comma-separated items into a numbered or bulleted list, as the prompt asks."""

import random

from mars_ray.data.tasks.checks import same_text
from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES, GOODS, THINGS

_PROMPTS = (
    "Format as a {style} list: {items}",
    "Make a {style} list of these: {items}",
    "Items: {items}. Write a {style} list.",
    "{items}: put them in a {style} list.",
)


def _make(rng: random.Random) -> TaskExample:
    items = rng.sample(rng.choice((CITIES, FIRST_NAMES, GOODS, THINGS)), rng.randint(3, 5))
    style = rng.choice(("numbered", "bulleted"))
    prompt = rng.choice(_PROMPTS).format(style=style, items=", ".join(items))
    marks = [f"{number}." if style == "numbered" else "-" for number in range(1, len(items) + 1)]
    response = "\n".join(f"{mark} {item}" for mark, item in zip(marks, items, strict=True))
    return TaskExample(family="list_format", prompt=prompt, response=response, answer=response)


FAMILY = Family(name="list_format", kind="easy", weight=2.0, make=_make, verify=same_text)

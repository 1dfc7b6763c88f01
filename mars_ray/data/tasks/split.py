"""Draw examples for training or for held-out judging, with no prompt in both, the same ones in every process."""

import hashlib
import random
from collections.abc import Iterator
from typing import Literal

from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.registry import FAMILIES

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 8
"""One prompt in this many is held out."""

FRUITLESS_DRAWS_MAX = 20_000
"""A stream ends after so many draws in a row gave nothing new: its prompts are used up."""


def split_of(prompt: str) -> Split:
    """The split a prompt belongs to: a property of its text alone, so no other choice can mix the two."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0 else "train"


def examples(family: Family, split: Split, seed: int) -> Iterator[TaskExample]:
    """Examples of one split, endless for training; held-out prompts come at most once and may run out."""
    rng = random.Random(f"{family.name}/{split}/{seed}")
    seen: set[str] = set()
    fruitless_draws = 0
    while fruitless_draws < FRUITLESS_DRAWS_MAX:
        example = family.make(rng)
        if split_of(example.prompt) != split or example.prompt in seen:
            fruitless_draws += 1
            continue
        fruitless_draws = 0
        if split == "heldout":
            seen.add(example.prompt)
        yield example


def mixture(split: Split, seed: int) -> Iterator[TaskExample]:
    """Examples of all families, each drawn as often as its weight says; ends when a family runs out."""
    families = tuple(FAMILIES.values())
    streams = {family.name: examples(family, split, seed) for family in families}
    weights = [family.weight for family in families]
    rng = random.Random(f"mixture/{split}/{seed}")
    while True:
        family = rng.choices(families, weights)[0]
        example = next(streams[family.name], None)
        if example is None:
            return
        yield example

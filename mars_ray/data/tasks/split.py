"""Draw training examples and held-out examples that share no prompts; every process draws the same examples."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.registry import FAMILIES
from mars_ray.errors import ConfigError

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 8
"""One prompt in `HELDOUT_ONE_IN` is held out."""

FRUITLESS_DRAWS_MAX = 20_000
"""After this many draws in a row without a new prompt, a stream ends, because its prompts are used up."""


def split_of(prompt: str) -> Split:
    """Return the split of a prompt. It depends only on the text, so the two splits never mix."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0 else "train"


def examples(family: Family, split: Split, seed: int) -> Iterator[TaskExample]:
    """Yield examples of one split: training examples endlessly, or held-out examples until their prompts, each used at
    most once, run out."""
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


def heldout_samples(family: Family, count: int, seeds: Sequence[int]) -> list[list[TaskExample]]:
    """Return a sample of `count` held-out examples for each seed; no two samples have a prompt in common.

    Raises `ConfigError` if the family has too few examples.
    """
    samples: list[list[TaskExample]] = []
    seen: set[str] = set()
    for seed in seeds:
        unseen = (example for example in examples(family, "heldout", seed) if example.prompt not in seen)
        samples.append(list(islice(unseen, count)))
        seen.update(example.prompt for example in samples[-1])
        if len(samples[-1]) < count:
            raise ConfigError(
                f"{family.name} has {len(seen):,} held-out examples, too few for {len(seeds)} samples of {count:,}. "
                "Lower --examples or --seeds."
            )
    return samples


def mixture(split: Split, seed: int) -> Iterator[TaskExample]:
    """Yield examples of all families in proportion to their weights, until a family runs out."""
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

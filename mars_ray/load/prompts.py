"""Draw the prompts of a load from a file.

Prompts are real text, because the speed of decoding depends on how well the model predicts its answers.
"""

import random
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from mars_ray.data.prompt_file import Conversation


def bundled_prompts() -> Path:
    """Return the path of the prompt file in the package."""
    return Path(str(files("mars_ray") / "assets" / "prompts.jsonl"))


def conversations(prompts: Sequence[Conversation], random_source: random.Random) -> Iterator[Conversation]:
    """Yield prompts endlessly, in shuffled passes over all of them."""
    while True:
        yield from random_source.sample(prompts, len(prompts))


class Texts:
    """Source of texts of any length, made of prompts in random order."""

    def __init__(self, prompts: Sequence[Conversation], random_source: random.Random) -> None:
        self._drawn = conversations(prompts, random_source)

    def of(self, words: int) -> str:
        """Return the next text, which has `words` words."""
        collected: list[str] = []
        while len(collected) < words:
            collected += " ".join(message["content"] for message in next(self._drawn)).split()
        return " ".join(collected[:words])

"""The prompts of a load, drawn from those of a file.

No words are made up: what a language model is bad at predicting, it decodes at another speed.
"""

import random
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from mars_ray.data.prompt_file import Conversation


def bundled_prompts() -> Path:
    """Return the file of prompts that comes with mars-ray."""
    return Path(str(files("mars_ray") / "assets" / "prompts.jsonl"))


def conversations(prompts: Sequence[Conversation], random_source: random.Random) -> Iterator[Conversation]:
    """Yield prompts without end, each once before any comes again."""
    while True:
        yield from random_source.sample(prompts, len(prompts))


class Texts:
    """Text of any length: prompts in random order, one after another, the last one cut."""

    def __init__(self, prompts: Sequence[Conversation], random_source: random.Random) -> None:
        self._drawn = conversations(prompts, random_source)

    def of(self, words: int) -> str:
        """Return a text of `words` words, another one every time."""
        found: list[str] = []
        while len(found) < words:
            found += " ".join(message["content"] for message in next(self._drawn)).split()
        return " ".join(found[:words])

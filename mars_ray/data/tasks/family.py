"""A family of generated tasks: a maker of examples and an exact judge of answers."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExample:
    """One prompt with a right response and what is needed to judge any other."""

    family: str
    prompt: str
    response: str
    """One right response, drawn at random where several are right; what a model is trained on."""
    answer: str
    """What `Family.verify` compares with: the canonical response, or the facts as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of task."""

    name: str
    kind: Literal["easy", "hard"]
    """Whether the tokens after the next one are easy or hard to foresee."""
    weight: float
    """Share of the training mix, relative to the other families."""
    make: Callable[[random.Random], TaskExample]
    verify: Callable[[str, str], bool]
    """(answer, text) -> is the text right? Returns False, never raises, whatever the text."""

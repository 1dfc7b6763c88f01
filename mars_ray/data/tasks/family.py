"""A family of generated tasks: a generator of examples, and an exact verifier of answers."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExample:
    """One prompt, a correct response, and the data for verifying other responses."""

    family: str
    prompt: str
    response: str
    """A correct response for training, drawn at random if there are several."""
    answer: str
    """The first argument of `Family.verify`: the canonical response, or the facts as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of task."""

    name: str
    kind: Literal["easy", "hard"]
    """Whether the tokens after the next one are easy or hard to predict."""
    weight: float
    """Share of the training data, relative to the other families."""
    make: Callable[[random.Random], TaskExample]
    verify: Callable[[str, str], bool]
    """Takes (answer, text), and returns whether the text is correct. It never raises an error, whatever the text is."""

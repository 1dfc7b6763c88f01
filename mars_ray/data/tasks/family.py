"""A family of generated tasks: a generator of examples, and an exact verifier of answers."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mars_ray.data.records import Message
from mars_ray.data.tasks.checks import same_text
from mars_ray.data.tasks.functions import Tool

Words = Mapping[str, str]
"""Words for the fields of a prompt's template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExample:
    """One prompt, a correct response, and the data for verifying other responses."""

    family: str
    prompt: str
    response: str
    """A correct response for training, drawn at random if there are several."""
    answer: str
    """The first argument of `Family.verify`: the canonical response, or the facts as JSON."""
    tools: tuple[Tool, ...] = ()
    """Functions that the response may call."""
    before: tuple[Message, ...] = ()
    """Messages before the prompt: the tools in a system message."""
    after: tuple[Message, ...] = ()
    """Messages after the prompt: a call and its result."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation that the response answers."""
        return (*self.before, {"role": "user", "content": self.prompt}, *self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of task."""

    name: str
    kind: Literal["easy", "hard"]
    """Whether the tokens after the next one are easy or hard to predict."""
    weight: float
    """Share of the mixture, relative to the other families; 0 for a family that is trained in a stage of its own."""
    make: Callable[[random.Random], TaskExample]
    verify: Callable[[str, str], bool]
    """Takes (answer, text), and returns whether the text is correct. It never raises an error, whatever the text is."""


def templated(
    name: str,
    kind: Literal["easy", "hard"],
    weight: float,
    prompts: Sequence[str],
    draw: Callable[[random.Random], tuple[Words, str]],
    verify: Callable[[str, str], bool] = same_text,
) -> Family:
    """Return a family whose prompts are templates; `draw` gives the words of a prompt and the response."""

    def make(rng: random.Random) -> TaskExample:
        words, response = draw(rng)
        prompt = rng.choice(prompts).format(**words)
        return TaskExample(family=name, prompt=prompt, response=response, answer=response)

    return Family(name=name, kind=kind, weight=weight, make=make, verify=verify)

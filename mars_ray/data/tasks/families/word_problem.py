"""Task: solve a two-step word problem; the response shows the steps and ends with the line "Answer: N"."""

import random
import re

from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES, THINGS

# Operators of the two steps, and stories for them. The first step computes with `x` and `y`, the second with `z`.
_STORIES = {
    "+-": (
        "{name} has {x} {things}, buys {y} more and gives away {z}.",
        "A shop in {city} has {x} {things}, gets {y} more and sells {z}.",
    ),
    "-+": (
        "{name} has {x} {things}, loses {y} and then finds {z}.",
        "A shop in {city} has {x} {things}, sells {y} and gets {z} more.",
    ),
    "*-": (
        "{name} packs {x} boxes of {y} {things} and sells {z} {things}.",
        "A shop in {city} gets {x} boxes of {y} {things} and sells {z}.",
    ),
    "*+": (
        "{name} buys {x} packs of {y} {things} and finds {z} more.",
        "A shop in {city} has {x} packs of {y} {things} and gets {z} more.",
    ),
}

_QUESTIONS = (
    "How many now? Show the steps.",
    "How many {things} now? Work it out.",
    "Compute how many there are now.",
)

_NUMBER = "(0|[1-9][0-9]{0,5})"
_STEP = re.compile(rf"{_NUMBER} ([-+*]) {_NUMBER} = {_NUMBER}")


def _apply(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _numbers(rng: random.Random, operators: str) -> tuple[int, int, int]:
    """Return three numbers for which the results of both steps are in 1..99."""
    if operators[0] == "*":
        x = rng.randint(2, 9)
        y = rng.randint(2, 9)
    else:
        x = rng.randint(20, 80)
        y = rng.randint(2, 9)
    first = _apply(x, operators[0], y)
    z = rng.randint(2, min(9, first - 1))
    return x, y, z


def _make(rng: random.Random) -> TaskExample:
    operators = rng.choice(tuple(_STORIES))
    x, y, z = _numbers(rng, operators)
    words = {"name": rng.choice(FIRST_NAMES), "city": rng.choice(CITIES), "things": rng.choice(THINGS)}
    story = rng.choice(_STORIES[operators]).format(x=x, y=y, z=z, **words)
    question = rng.choice(_QUESTIONS).format(**words)
    first = _apply(x, operators[0], y)
    last = _apply(first, operators[1], z)
    response = f"{x} {operators[0]} {y} = {first}\n{first} {operators[1]} {z} = {last}\nAnswer: {last}"
    return TaskExample(family="word_problem", prompt=f"{story} {question}", response=response, answer=str(last))


def _verify(answer: str, text: str) -> bool:
    """Return whether the last line gives the answer and every other line is a correct step; steps may be left out."""
    *steps, last = text.strip().split("\n")
    return last.strip() == f"Answer: {answer}" and all(map(_is_true_step, steps))


def _is_true_step(line: str) -> bool:
    match = _STEP.fullmatch(line.strip())
    if match is None:
        return False
    left, operator, right, result = match.groups()
    return _apply(int(left), operator, int(right)) == int(result)


FAMILY = Family(name="word_problem", kind="easy", weight=2.0, make=_make, verify=_verify)

"""Tasks with numbers: conversions, word problems, sorting, sums, and walks along links between digits."""

import random
import re
from decimal import Decimal

from mars_ray.data.tasks.checks import same_text
from mars_ray.data.tasks.family import Family, TaskExample, Words, templated
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES, THINGS

# Larger unit, smaller unit, and the number of places that the decimal point moves.
_DECIMAL_UNITS = (
    ("km", "m", 3),
    ("m", "cm", 2),
    ("cm", "mm", 1),
    ("kg", "g", 3),
    ("t", "kg", 3),
    ("g", "mg", 3),
    ("l", "ml", 3),
)
# Larger unit, smaller unit, factor, and the largest amount, chosen so that a tiny model can learn the products.
_TIME_UNITS = (("h", "min", 60, 15), ("min", "s", 60, 15), ("days", "h", 24, 10), ("weeks", "days", 7, 20))


def _decimal_pair(rng: random.Random) -> tuple[str, str, str, str]:
    large, small, places = rng.choice(_DECIMAL_UNITS)
    decimals = min(places, rng.choice((0, 1, 1, 2)))
    # The last decimal is never zero, so that each amount has only one spelling.
    tail = "".join(str(rng.randint(0, 9)) for _ in range(decimals - 1)) + str(rng.randint(1, 9))
    amount = Decimal(f"{rng.randint(1, 99)}.{tail}" if decimals else str(rng.randint(1, 99)))
    pair = (str(amount), large, f"{amount.scaleb(places):f}", small)
    return pair if rng.random() < 0.5 else (*pair[2:], *pair[:2])


def _time_pair(rng: random.Random) -> tuple[str, str, str, str]:
    large, small, factor, largest = rng.choice(_TIME_UNITS)
    amount = rng.randint(2, largest)
    pair = (str(amount), large, str(amount * factor), small)
    return pair if rng.random() < 0.5 else (*pair[2:], *pair[:2])


def _conversion(rng: random.Random) -> tuple[Words, str]:
    pair = _time_pair if rng.random() < 0.25 else _decimal_pair
    value, unit, result, target = pair(rng)
    words = {"value": value, "unit": unit, "target": target}
    words |= {"name": rng.choice(FIRST_NAMES), "city": rng.choice(CITIES)}
    return words, f"{value} {unit} = {result} {target}"


UNIT_CONVERT = templated(
    "unit_convert",
    "easy",
    1.5,
    (
        "{name} notes {value} {unit} in {city}. Convert it to {target}.",
        "Convert {value} {unit} to {target} for the order of {name}, {city}.",
        "Report from {city}: {value} {unit}. {name} needs it in {target}.",
        "{name} in {city} asks: how much is {value} {unit} in {target}?",
    ),
    _conversion,
)

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


def _operands(rng: random.Random, operators: str) -> tuple[int, int, int]:
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


def _word_problem(rng: random.Random) -> TaskExample:
    """Ask for the result of two steps; the response shows them and ends with the line "Answer: N"."""
    operators = rng.choice(tuple(_STORIES))
    x, y, z = _operands(rng, operators)
    words = {"name": rng.choice(FIRST_NAMES), "city": rng.choice(CITIES), "things": rng.choice(THINGS)}
    story = rng.choice(_STORIES[operators]).format(x=x, y=y, z=z, **words)
    question = rng.choice(_QUESTIONS).format(**words)
    first = _apply(x, operators[0], y)
    last = _apply(first, operators[1], z)
    response = f"{x} {operators[0]} {y} = {first}\n{first} {operators[1]} {z} = {last}\nAnswer: {last}"
    return TaskExample(family="word_problem", prompt=f"{story} {question}", response=response, answer=str(last))


def _solves(answer: str, text: str) -> bool:
    """Return whether the last line gives the answer and every other line is a correct step; steps may be left out."""
    *steps, last = text.strip().split("\n")
    return last.strip() == f"Answer: {answer}" and all(map(_is_true_step, steps))


def _is_true_step(line: str) -> bool:
    match = _STEP.fullmatch(line.strip())
    if match is None:
        return False
    left, operator, right, result = match.groups()
    return _apply(int(left), operator, int(right)) == int(result)


WORD_PROBLEM = Family(name="word_problem", kind="easy", weight=2.0, make=_word_problem, verify=_solves)

# Each instruction, and True if it asks for the largest number first.
_SORT_PROMPTS = (
    ("Sort from smallest to largest: {numbers}", False),
    ("Put these in ascending order: {numbers}", False),
    ("{numbers}. List them with the lowest first.", False),
    ("Sort from largest to smallest: {numbers}", True),
    ("Put these in descending order: {numbers}", True),
    ("{numbers}. List them with the highest first.", True),
)


def _sort(rng: random.Random) -> TaskExample:
    """Ask to sort numbers. Hard to predict ahead, because each position requires comparing all numbers."""
    numbers = rng.sample(range(10, 100), rng.randint(5, 6))
    prompt, largest_first = rng.choice(_SORT_PROMPTS)
    response = ", ".join(map(str, sorted(numbers, reverse=largest_first)))
    prompt = prompt.format(numbers=", ".join(map(str, numbers)))
    return TaskExample(family="sort_numbers", prompt=prompt, response=response, answer=response)


SORT_NUMBERS = Family(name="sort_numbers", kind="hard", weight=1.5, make=_sort, verify=same_text)

_SUM_PROMPTS = (
    "{name} counts {things}: {parts}. Reply with the total only.",
    "Stock of {things}: {parts}. Give just the sum.",
    "How many {things} does {name} have? {parts}. Number only.",
    "Add up the {things}: {parts}. Answer with a number.",
)


def _addends(rng: random.Random) -> list[int]:
    """Return numbers with a sum of at most 99, few enough for a tiny model to learn."""
    kind = rng.random()
    if kind < 0.6:
        first = rng.randint(10, 89)
        return [first, rng.randint(10, 99 - first)]
    if kind < 0.85:
        return rng.sample((rng.randint(10, 90), rng.randint(2, 9)), 2)
    return [rng.randint(2, 9) for _ in range(3)]


def _sum(rng: random.Random) -> TaskExample:
    """Ask for a sum without intermediate steps."""
    numbers = _addends(rng)
    cities = rng.sample(CITIES, len(numbers))
    prompt = rng.choice(_SUM_PROMPTS).format(
        name=rng.choice(FIRST_NAMES),
        things=rng.choice(THINGS),
        parts=", ".join(f"{number} in {city}" for number, city in zip(numbers, cities, strict=True)),
    )
    response = str(sum(numbers))
    return TaskExample(family="sum_direct", prompt=prompt, response=response, answer=response)


SUM_DIRECT = Family(name="sum_direct", kind="hard", weight=2.0, make=_sum, verify=same_text)


def _walk(rng: random.Random) -> tuple[Words, str]:
    """Draw links between digits and a walk along them. Hard to predict ahead, because each digit needs one more lookup.

    The prompt names the last digit instead of the number of links, so that a tiny model does not have to count.
    """
    # One cycle through 8 to 10 digits: each digit occurs once, with one link to it and one link from it.
    cycle = rng.sample("0123456789", rng.randint(8, 10))
    path = cycle[: rng.randint(6, min(8, len(cycle) - 1)) + 1]
    links = [f"{a}>{b}" for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    rng.shuffle(links)
    return {"start": path[0], "end": path[-1], "links": " ".join(links)}, "".join(path)


FOLLOW_LINKS = templated(
    "follow_links",
    "hard",
    0.75,
    (
        "Follow the links from {start} to {end}: {links}",
        "Links: {links}. List the digits from {start} to {end}.",
        "{links}. Walk from {start} to {end}.",
        "Start at {start}, stop at {end}, follow: {links}",
    ),
    _walk,
)

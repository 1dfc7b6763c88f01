"""Task: convert a length, mass, volume or time; the response has the form "3.4 km = 3400 m"."""

import random
from decimal import Decimal

from mars_ray.data.tasks.checks import same_text
from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES

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

_PROMPTS = (
    "{name} notes {value} {unit} in {city}. Convert it to {target}.",
    "Convert {value} {unit} to {target} for the order of {name}, {city}.",
    "Report from {city}: {value} {unit}. {name} needs it in {target}.",
    "{name} in {city} asks: how much is {value} {unit} in {target}?",
)


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


def _make(rng: random.Random) -> TaskExample:
    pair = _time_pair if rng.random() < 0.25 else _decimal_pair
    value, unit, result, target = pair(rng)
    words = {"name": rng.choice(FIRST_NAMES), "city": rng.choice(CITIES)}
    prompt = rng.choice(_PROMPTS).format(value=value, unit=unit, target=target, **words)
    response = f"{value} {unit} = {result} {target}"
    return TaskExample(family="unit_convert", prompt=prompt, response=response, answer=response)


FAMILY = Family(name="unit_convert", kind="easy", weight=1.5, make=_make, verify=same_text)

"""Task: turn a table row with its header into one sentence of a fixed form."""

import random

from mars_ray.data.tasks.checks import same_text
from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, DAYS, FIRST_NAMES, TEAMS, THINGS

_PROMPTS = (
    "Describe the row in one sentence.\n{table}",
    "Write this table row as a sentence:\n{table}",
    "{table}\nSay what this row means.",
    "Row to text, please:\n{table}",
)


def _goods_row(rng: random.Random) -> tuple[str, str]:
    item = rng.choice(THINGS)
    stock = rng.randint(2, 99)
    price = f"{rng.randint(1, 49)}.{rng.choice((25, 50, 75, 95))}"
    return f"item|price|stock\n{item}|{price}|{stock}", f"The {item} cost {price} dollars and {stock} are in stock."


def _staff_row(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(FIRST_NAMES)
    team = rng.choice(TEAMS)
    floor = rng.randint(1, 20)
    city = rng.choice(CITIES)
    return (
        f"name|team|floor|city\n{name}|{team}|{floor}|{city}",
        f"{name} works in the {team} team on floor {floor} in {city}.",
    )


def _train_row(rng: random.Random) -> tuple[str, str]:
    start, end = rng.sample(CITIES, 2)
    day = rng.choice(DAYS)
    time = f"{rng.randint(6, 22):02}:{rng.randrange(0, 60, 5):02}"
    return (
        f"from|to|day|time\n{start}|{end}|{day}|{time}",
        f"The train from {start} to {end} leaves on {day} at {time}.",
    )


def _make(rng: random.Random) -> TaskExample:
    table, response = rng.choice((_goods_row, _staff_row, _train_row))(rng)
    prompt = rng.choice(_PROMPTS).format(table=table)
    return TaskExample(family="table_to_text", prompt=prompt, response=response, answer=response)


FAMILY = Family(name="table_to_text", kind="easy", weight=1.0, make=_make, verify=same_text)

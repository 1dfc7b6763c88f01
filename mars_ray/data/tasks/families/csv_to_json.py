"""Task: turn a CSV row or key=value lines into JSON with a list or a nested object."""

import json
import random

from mars_ray.data.tasks.checks import same_json
from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, COLOURS, FIRST_NAMES, GOODS, THINGS

_PROMPTS = (
    "Convert this data to JSON:\n{source}",
    "Write this as one line of JSON.\n{source}",
    "{source}\nGive the same data as JSON.",
    "Parse into a JSON object:\n{source}",
)


def _row_with_list(rng: random.Random) -> tuple[str, dict[str, object]]:
    name = rng.choice(FIRST_NAMES)
    age = rng.randint(18, 89)
    likes = rng.sample(GOODS, rng.randint(2, 3))
    return f"name,age,likes\n{name},{age},{';'.join(likes)}", {"name": name, "age": age, "likes": likes}


def _nested_size(rng: random.Random) -> tuple[str, dict[str, object]]:
    item = rng.choice(THINGS)
    colour = rng.choice(COLOURS)
    w = rng.randint(2, 99)
    h = rng.randint(2, 99)
    return (
        f"item={item}\ncolor={colour}\nsize.w={w}\nsize.h={h}",
        {"item": item, "color": colour, "size": {"w": w, "h": h}},
    )


def _list_of_temperatures(rng: random.Random) -> tuple[str, dict[str, object]]:
    city = rng.choice(CITIES)
    temps = [rng.randint(1, 39) for _ in range(rng.randint(3, 4))]
    return f"city={city}\ntemps={';'.join(map(str, temps))}", {"city": city, "temps": temps}


def _make(rng: random.Random) -> TaskExample:
    source, value = rng.choice((_row_with_list, _nested_size, _list_of_temperatures))(rng)
    prompt = rng.choice(_PROMPTS).format(source=source)
    response = json.dumps(value)
    return TaskExample(family="csv_to_json", prompt=prompt, response=response, answer=response)


FAMILY = Family(name="csv_to_json", kind="easy", weight=1.0, make=_make, verify=same_json)

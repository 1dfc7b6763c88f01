"""Task: turn a sentence into a one-line JSON object with three fields."""

import json
import random

from mars_ray.data.tasks.checks import same_json
from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES, THINGS

_SENTENCES = {
    ("name", "age", "city"): (
        "{name}, {age}, lives in {city}.",
        "{name} from {city} is {age} years old.",
        "At {age}, {name} moved to {city}.",
    ),
    ("name", "count", "item"): (
        "{name} ordered {count} {item}.",
        "We sent {count} {item} to {name}.",
        "There are {count} {item} for {name}.",
    ),
    ("name", "nights", "city"): (
        "{name} booked {nights} nights in {city}.",
        "In {city}, {name} stays {nights} nights.",
    ),
}

_PROMPTS = (
    "Extract {a}, {b} and {c} as JSON: {sentence}",
    "{sentence} Give {a}, {b}, {c} as JSON.",
    "JSON with the keys {a}, {b}, {c}: {sentence}",
    "Turn this into JSON ({a}, {b}, {c}). {sentence}",
)


def _make(rng: random.Random) -> TaskExample:
    keys = rng.choice(tuple(_SENTENCES))
    facts = {
        "name": rng.choice(FIRST_NAMES),
        "age": rng.randint(18, 89),
        "city": rng.choice(CITIES),
        "count": rng.randint(2, 99),
        "item": rng.choice(THINGS),
        "nights": rng.randint(2, 21),
    }
    sentence = rng.choice(_SENTENCES[keys]).format(**facts)
    prompt = rng.choice(_PROMPTS).format(a=keys[0], b=keys[1], c=keys[2], sentence=sentence)
    response = json.dumps({key: facts[key] for key in keys})
    return TaskExample(family="json_extract", prompt=prompt, response=response, answer=response)


FAMILY = Family(name="json_extract", kind="easy", weight=1.0, make=_make, verify=same_json)

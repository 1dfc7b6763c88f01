"""Task: turn a sentence into a one-line JSON object with the keys that the prompt lists, in the order of the list."""

import json
import random
from string import Formatter

from mars_ray.data.tasks.checks import same_json
from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, COLOURS, DAYS, FIRST_NAMES, JOBS, MONTHS, TEAMS, THINGS

# The fields of a sentence are its facts. A prompt asks for some of them, in any order.
_SENTENCES = (
    "{name} lives in {city}.",
    "{name} is from {city}.",
    "{name} moved to {city}.",
    "{name} works in {city}.",
    "{name} is {age} years old.",
    "{name} is {age}.",
    "{name} is a {job}.",
    "{name} was born in {year}.",
    "{name} arrives on {day}.",
    "{name} called at {time}.",
    "The {item} cost {price} euros.",
    "{name}, {age}, lives in {city}.",
    "{name} from {city} is {age} years old.",
    "At {age}, {name} moved to {city}.",
    "{name} ordered {count} {item}.",
    "We sent {count} {item} to {name}.",
    "There are {count} {item} for {name}.",
    "{name} booked {nights} nights in {city}.",
    "In {city}, {name} stays {nights} nights.",
    "{name} is a {job} in {city}.",
    "{name}, a {job}, is {age} years old.",
    "{name} was born in {city} in {year}.",
    "{name} has a meeting on {day} at {time}.",
    "{name} flies to {city} on {day}.",
    "{name} of the {team} team works in {city}.",
    "{name} has {count} {item}.",
    "{name}, {age}, is a {job} in {city}.",
    "{name} is a {age} year old {job} from {city}.",
    "{name} from {city} ordered {count} {item}.",
    "{name} bought {count} {color} {item}.",
    "{name} bought {count} {item} for {price} euros.",
    "On {day}, {name} sent {count} {item} to {city}.",
    "In {month}, {name} stays {nights} nights in {city}.",
    "{name} leaves {city} on {day} at {time}.",
    "{name}, {age}, joined the {team} team in {city}.",
    "{name}, a {job} from {city}, was born in {year}.",
    "{name}, {age}, from {city} ordered {count} {item}.",
    "{name}, a {job} in {city}, has {count} {item}.",
    "{name}, {age}, booked {nights} nights in {city} in {month}.",
    "{name} from {city} has {count} {color} {item}.",
    "On {day} at {time}, {name} sold {count} {item}.",
    "{name} sold {count} {color} {item} for {price} euros.",
)

_PROMPTS = (
    "Extract {phrase} as JSON: {sentence}",
    "{sentence} Give {keys} as JSON.",
    "JSON with the keys {keys}: {sentence}",
    "Turn this into JSON ({keys}). {sentence}",
    "JSON with the keys {phrase}: {sentence}",
    "{keys} as JSON: {sentence}",
    "Give me {phrase} as JSON: {sentence}",
    "{sentence} Return {phrase} as JSON.",
    "Return JSON with the keys {keys}.\n{sentence}",
)

_KEYS = (2, 4)
"""Least and most keys of a prompt."""

_SLIPS = ((": ", ":\n"), (": ", ":  "), ("JSON", "json"))
"""Texts of prompts, and what a hasty writer types instead."""

_FACTS = {text: tuple(name for _, name, _, _ in Formatter().parse(text) if name) for text in _SENTENCES}


def _make(rng: random.Random) -> TaskExample:
    count = rng.randint(*_KEYS)
    sentence, facts = rng.choice([(text, facts) for text, facts in _FACTS.items() if len(facts) >= count])
    values = _values(rng)
    keys = rng.sample(facts, count)
    prompt = rng.choice(_PROMPTS).format(
        keys=", ".join(keys),
        phrase=", ".join(keys[:-1]) + f" and {keys[-1]}",
        sentence=sentence.format(**values),
    )
    if rng.random() < 0.15:
        prompt = prompt.replace(*rng.choice(_SLIPS))
    if rng.random() < 0.15:
        prompt = prompt.removesuffix(".")
    response = json.dumps({key: values[key] for key in keys})
    return TaskExample(family="json_extract", prompt=prompt, response=response, answer=response)


def _values(rng: random.Random) -> dict[str, str | int]:
    name = rng.choice(FIRST_NAMES)
    city = rng.choice(CITIES)
    return {
        "name": name if rng.random() < 0.8 else f"{name} {rng.choice(FIRST_NAMES)}",
        "age": rng.randint(18, 89),
        "city": city if rng.random() < 0.9 else f"{rng.choice(('New', 'Port', 'San'))} {city}",
        "count": rng.randint(2, 99),
        "item": rng.choice(THINGS),
        "nights": rng.randint(2, 21),
        "job": rng.choice(JOBS),
        "year": rng.randint(1940, 2009),
        "day": rng.choice(DAYS),
        "month": rng.choice(MONTHS),
        "time": f"{rng.randint(8, 21):02}:{rng.randrange(0, 60, 5):02}",
        "price": rng.randint(2, 99),
        "team": rng.choice(TEAMS),
        "color": rng.choice(COLOURS),
    }


FAMILY = Family(name="json_extract", kind="easy", weight=1.0, make=_make, verify=same_json)

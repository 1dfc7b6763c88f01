"""Tasks that write the facts of a prompt in another form: as JSON, a sentence, a list, a message or another date."""

import json
import random
from collections.abc import Mapping
from datetime import date, timedelta
from string import Formatter

from mars_ray.data.tasks.checks import same_json
from mars_ray.data.tasks.family import Family, TaskExample, Words, templated
from mars_ray.data.tasks.lexicon import CITIES, COLOURS, DAYS, FIRST_NAMES, GOODS, JOBS, MONTHS, TEAMS, THINGS, VISITS

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
"""Sentences for `json_extract`. Their fields are facts; a prompt asks for some of them, in any order."""

_EXTRACT_PROMPTS = (
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

_EXTRACTED = (2, 4)
"""Least and most keys of a prompt."""

_SLIPS = ((": ", ":\n"), (": ", ":  "), ("JSON", "json"))
"""Texts of prompts, and what a hasty writer types instead."""

_FACTS = {text: tuple(name for _, name, _, _ in Formatter().parse(text) if name) for text in _SENTENCES}


def _extract(rng: random.Random) -> TaskExample:
    """Ask for facts of a sentence as a one-line JSON object with the keys that the prompt lists, in their order."""
    count = rng.randint(*_EXTRACTED)
    sentence, facts = rng.choice([(text, facts) for text, facts in _FACTS.items() if len(facts) >= count])
    values = _values(rng)
    keys = rng.sample(facts, count)
    prompt = rng.choice(_EXTRACT_PROMPTS).format(
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
        "time": _time(rng, 8, 21),
        "price": rng.randint(2, 99),
        "team": rng.choice(TEAMS),
        "color": rng.choice(COLOURS),
    }


def _time(rng: random.Random, first_hour: int, last_hour: int) -> str:
    return f"{rng.randint(first_hour, last_hour):02}:{rng.randrange(0, 60, 5):02}"


JSON_EXTRACT = Family(name="json_extract", kind="easy", weight=1.0, make=_extract, verify=same_json)


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
    time = _time(rng, 6, 22)
    return (
        f"from|to|day|time\n{start}|{end}|{day}|{time}",
        f"The train from {start} to {end} leaves on {day} at {time}.",
    )


def _row_as_sentence(rng: random.Random) -> tuple[Words, str]:
    table, sentence = rng.choice((_goods_row, _staff_row, _train_row))(rng)
    return {"table": table}, sentence


TABLE_TO_TEXT = templated(
    "table_to_text",
    "easy",
    1.0,
    (
        "Describe the row in one sentence.\n{table}",
        "Write this table row as a sentence:\n{table}",
        "{table}\nSay what this row means.",
        "Row to text, please:\n{table}",
    ),
    _row_as_sentence,
)


def _row_with_list(rng: random.Random) -> tuple[str, Mapping[str, object]]:
    name = rng.choice(FIRST_NAMES)
    age = rng.randint(18, 89)
    likes = rng.sample(GOODS, rng.randint(2, 3))
    return f"name,age,likes\n{name},{age},{';'.join(likes)}", {"name": name, "age": age, "likes": likes}


def _nested_size(rng: random.Random) -> tuple[str, Mapping[str, object]]:
    item = rng.choice(THINGS)
    colour = rng.choice(COLOURS)
    w = rng.randint(2, 99)
    h = rng.randint(2, 99)
    return (
        f"item={item}\ncolor={colour}\nsize.w={w}\nsize.h={h}",
        {"item": item, "color": colour, "size": {"w": w, "h": h}},
    )


def _list_of_temperatures(rng: random.Random) -> tuple[str, Mapping[str, object]]:
    city = rng.choice(CITIES)
    temps = [rng.randint(1, 39) for _ in range(rng.randint(3, 4))]
    return f"city={city}\ntemps={';'.join(map(str, temps))}", {"city": city, "temps": temps}


def _source_as_json(rng: random.Random) -> tuple[Words, str]:
    source, value = rng.choice((_row_with_list, _nested_size, _list_of_temperatures))(rng)
    return {"source": source}, json.dumps(value)


CSV_TO_JSON = templated(
    "csv_to_json",
    "easy",
    1.0,
    (
        "Convert this data to JSON:\n{source}",
        "Write this as one line of JSON.\n{source}",
        "{source}\nGive the same data as JSON.",
        "Parse into a JSON object:\n{source}",
    ),
    _source_as_json,
    same_json,
)


def _list(rng: random.Random) -> tuple[Words, str]:
    items = rng.sample(rng.choice((CITIES, FIRST_NAMES, GOODS, THINGS)), rng.randint(3, 5))
    style = rng.choice(("numbered", "bulleted"))
    marks = [f"{number}." if style == "numbered" else "-" for number in range(1, len(items) + 1)]
    response = "\n".join(f"{mark} {item}" for mark, item in zip(marks, items, strict=True))
    return {"style": style, "items": ", ".join(items)}, response


LIST_FORMAT = templated(
    "list_format",
    "easy",
    2.0,
    (
        "Format as a {style} list: {items}",
        "Make a {style} list of these: {items}",
        "Items: {items}. Write a {style} list.",
        "{items}: put them in a {style} list.",
    ),
    _list,
)

# Kind, required facts and text of each message.
_MESSAGES = (
    (
        "appointment reminder",
        ("name", "visit", "day", "time"),
        "Dear {name}, your {visit} appointment is on {day} at {time}. Please reply YES to confirm.",
    ),
    (
        "delivery notice",
        ("name", "goods", "day", "city"),
        "Hello {name}, your order of {goods} will reach {city} on {day}. Thank you for shopping with us.",
    ),
    (
        "table booking",
        ("name", "guests", "day", "time"),
        "Hi {name}, your table for {guests} is booked for {day} at {time}. We look forward to seeing you.",
    ),
)


def _message(rng: random.Random) -> tuple[Words, str]:
    kind, keys, text = rng.choice(_MESSAGES)
    facts = {
        "name": rng.choice(FIRST_NAMES),
        "visit": rng.choice(VISITS),
        "goods": rng.choice(GOODS),
        "guests": str(rng.randint(2, 12)),
        "day": rng.choice(DAYS),
        "time": _time(rng, 8, 21),
        "city": rng.choice(CITIES),
    }
    return {"kind": kind, "facts": ", ".join(f"{key}: {facts[key]}" for key in keys)}, text.format(**facts)


MESSAGE_FILL = templated(
    "message_fill",
    "easy",
    1.0,
    (
        "Write the {kind}. {facts}",
        "{facts}. Fill in the {kind}.",
        "Message type: {kind}. {facts}",
        "Compose the usual {kind}: {facts}",
    ),
    _message,
)

_FIRST_DAY = date(1980, 1, 1)
_DAYS = (date(2040, 1, 1) - _FIRST_DAY).days


def _date(rng: random.Random) -> tuple[Words, str]:
    day = _FIRST_DAY + timedelta(days=rng.randrange(_DAYS))
    written = {
        "YYYY-MM-DD": day.isoformat(),
        "MM/DD/YYYY": f"{day.month:02}/{day.day:02}/{day.year}",
        "day month year": f"{day.day} {MONTHS[day.month - 1]} {day.year}",
    }
    source, target = rng.sample(tuple(written), 2)
    return {"source": written[source], "target": target}, written[target]


DATE_REWRITE = templated(
    "date_rewrite",
    "easy",
    1.0,
    (
        "Write the date {source} in the form {target}.",
        "Rewrite {source} as a date like {target}.",
        "Change the date format to {target}: {source}",
        "The deadline is {source}. Give it as {target}.",
    ),
    _date,
)

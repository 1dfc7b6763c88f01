"""Task: fill a fixed customer message with the facts from the prompt."""

import random

from mars_ray.data.tasks.checks import same_text
from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, DAYS, FIRST_NAMES, GOODS, VISITS

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

_PROMPTS = (
    "Write the {kind}. {facts}",
    "{facts}. Fill in the {kind}.",
    "Message type: {kind}. {facts}",
    "Compose the usual {kind}: {facts}",
)


def _make(rng: random.Random) -> TaskExample:
    kind, keys, text = rng.choice(_MESSAGES)
    facts = {
        "name": rng.choice(FIRST_NAMES),
        "visit": rng.choice(VISITS),
        "goods": rng.choice(GOODS),
        "guests": str(rng.randint(2, 12)),
        "day": rng.choice(DAYS),
        "time": f"{rng.randint(8, 21):02}:{rng.randrange(0, 60, 5):02}",
        "city": rng.choice(CITIES),
    }
    listed = ", ".join(f"{key}: {facts[key]}" for key in keys)
    prompt = rng.choice(_PROMPTS).format(kind=kind, facts=listed)
    response = text.format(**facts)
    return TaskExample(family="message_fill", prompt=prompt, response=response, answer=response)


FAMILY = Family(name="message_fill", kind="easy", weight=1.0, make=_make, verify=same_text)

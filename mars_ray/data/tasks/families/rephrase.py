"""Task: word a customer note. At low thresholds, decoding ahead mixes two wordings.

Both sentences of the response have three wordings. The first wording is the most likely (0.42), so decoding one token
at a time chooses it. The other two (0.29 each) differ only in their first token ("A" or "1": one character, and so one
token in any byte-level vocabulary). From the second position on, the words that these two share therefore have the
probability 0.29 + 0.29 = 0.58. A threshold below 0.58 accepts those words after the first token of the most likely
wording, and the result matches no wording.
"""

import json
import random
from collections.abc import Mapping
from itertools import product

from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, DAYS, FIRST_NAMES, GOODS

WORDING_SHARES = (0.42, 0.29, 0.29)
"""Probability of each wording, both of the opening and of the closing sentence."""

OPENINGS = (
    "Please look out for your order of {goods}, due in {city} on {day}.",
    "A parcel has been sent out to {city} with {goods} for {day}.",
    "1 parcel has been sent out to {city} with {goods} for {day}.",
)

CLOSINGS = (
    "Should you need another day, just ask {name}.",
    "A call is enough to change this: talk to {name}.",
    "1 call is enough to change this: talk to {name}.",
)

# The closing sentence starts on a new line, so that its first character is a token of its own too.
_JOIN = "\n"

_PROMPTS = (
    "Write to a customer: {goods} to {city} on {day}, contact {name}.",
    "Customer note. Goods: {goods}. City: {city}. Day: {day}. Contact: {name}.",
    "Word this for a customer: {goods}, {city}, {day}, ask {name}.",
    "Tell a customer about {goods} for {city} on {day}. {name} helps.",
)


def _make(rng: random.Random) -> TaskExample:
    facts = {
        "goods": rng.choice(GOODS),
        "city": rng.choice(CITIES),
        "day": rng.choice(DAYS),
        "name": rng.choice(FIRST_NAMES),
    }
    prompt = rng.choice(_PROMPTS).format(**facts)
    opening, closing = (rng.choices(words, WORDING_SHARES)[0] for words in (OPENINGS, CLOSINGS))
    response = _JOIN.join((opening, closing)).format(**facts)
    return TaskExample(family="rephrase", prompt=prompt, response=response, answer=json.dumps(facts))


def valid_texts(facts: Mapping[str, str]) -> list[str]:
    """Return the nine correct responses for the facts `goods`, `city`, `day` and `name`."""
    return [_JOIN.join(pair).format(**facts) for pair in product(OPENINGS, CLOSINGS)]


def _verify(answer: str, text: str) -> bool:
    return text.strip() in valid_texts(json.loads(answer))


REPHRASE = Family(name="rephrase", kind="hard", weight=0.75, make=_make, verify=_verify)

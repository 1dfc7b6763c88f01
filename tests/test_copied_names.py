"""The bundled model copies names and cities that its training data does not have."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from mars_ray import LLM, SamplingParams
from mars_ray.data.tasks.family import TaskExample
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES, words
from mars_ray.data.tasks.split import mixture
from pipelines.made_up_words import syllables

EXAMPLES = 300
PEOPLE = words(
    "Aaliyah Abdul Ada Ahmed Aisha Akira Alejandro Amara Amelia Andrei Ann Anya Aoife Arjun Astrid Beatrice Bjorn Bob "
    "Caitlin Camille Carlos Chiara Chloe Declan Diego Dmitri Edward Eleanor Elif Elizabeth Emeka Emily Esther Fatima "
    "Felix Fiona Francesca George Gianni Giulia Gustavo Hannah Harold Hiroshi Ibrahim Imogen Ingrid Isabella Jasmine "
    "Javier Joanna Jorge Josephine Kenji Khadija Kofi Lakshmi Lars Leila Liam Ludwig Luis Magnus Mateo Matilda Mei "
    "Mohammed Nadia Natalie Ngozi Nikolai Olivia Omar Patricia Pedro Priya Quentin Rahul Ravi Rebecca Ruth Salma "
    "Samuel Sanjay Sean Sergei Siobhan Stefan Svetlana Tariq Theodore Ursula Valentina Vikram Walter Wei Xavier Yasmin "
    "Yuki Zachary Zoe"
)
PLACES = words(
    "Amsterdam Ankara Auckland Bangkok Barcelona Beirut Bogota Brussels Budapest Caracas Chennai Copenhagen Damascus "
    "Edinburgh Florence Glasgow Havana Helsinki Istanbul Jakarta Kampala Karachi Lagos Liverpool Marseille Melbourne "
    "Montreal Mumbai Nairobi Osaka Palermo Perth Reykjavik Rotterdam Salzburg Santiago Sarajevo Seville Singapore "
    "Stockholm Tbilisi Utrecht Valencia Venice Vilnius Wellington Zagreb"
)
KNOWN = re.compile(rf"\b(?:{'|'.join((*FIRST_NAMES, *CITIES))})\b")


def real_name(known: str, rng: random.Random) -> str:
    return rng.choice(PEOPLE if known in FIRST_NAMES else PLACES)


def made_up_name(_known: str, rng: random.Random) -> str:
    return syllables(rng).capitalize()


def renamed_examples(new_name: Callable[[str, random.Random], str]) -> Iterator[tuple[TaskExample, set[str]]]:
    """Yield held-out examples with new names, and the names that belong in the answer."""
    rng = random.Random(11)
    for example in mixture("heldout", 11):
        known = list(dict.fromkeys(KNOWN.findall(example.prompt)))
        new = {name: new_name(name, rng) for name in known}
        copied = {new[name] for name in KNOWN.findall(example.response) if name in new}
        if copied and len(set(new.values())) == len(new):
            parts = re.split(f"({KNOWN.pattern})", example.prompt)
            yield replace(example, prompt="".join(new.get(part, part) for part in parts)), copied


@pytest.mark.parametrize("new_name", [real_name, made_up_name])
def test_names_it_was_never_trained_on_are_copied_right(new_name: Callable[[str, random.Random], str]) -> None:
    examples = [example for example, _ in zip(renamed_examples(new_name), range(EXAMPLES), strict=False)]
    answers = LLM("bundled").chat([example.prompt for example, _ in examples], SamplingParams(max_tokens=96))
    wrong = [
        (example.prompt, answer.text)
        for (example, copied), answer in zip(examples, answers, strict=True)
        if not copied <= set(re.findall(r"\w+", answer.text))
    ]
    assert len(wrong) <= 0.08 * EXAMPLES, wrong

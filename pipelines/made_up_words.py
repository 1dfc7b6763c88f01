"""Replace words of the task families by made-up words, so that a model learns to copy words it has never seen."""

import random
import re
from collections.abc import Callable
from dataclasses import replace

from mars_ray.data.tasks.family import TaskExample
from mars_ray.data.tasks.lexicon import (
    CITIES,
    COLOURS,
    DAYS,
    FIRST_NAMES,
    GOODS,
    JOBS,
    MONTHS,
    TEAMS,
    THINGS,
    VISITS,
    words,
)

MakeWord = Callable[[random.Random], str]
"""Makes a word of 2 to 12 small letters."""

_LETTERS = (2, 12)
_PARTS = (*FIRST_NAMES, *CITIES, *GOODS, *THINGS, *COLOURS, *DAYS, *MONTHS, *TEAMS, *VISITS)
_WORDS = re.compile(rf"\b(?:{'|'.join((*FIRST_NAMES, *CITIES, *GOODS, *JOBS, *THINGS))})\b")
# Common letters are repeated, so that the words look like names.
_ONSETS = (*"bbccddffghhjjkkllllmmmmnnnnppqrrrrssssttttvvwxyz", *("",) * 6)
_CLUSTERS = words("bl br ch cl cr dr fl fr gh gl gr kh kr ng ph pl pr qu sh sk sl sm sp st str th tr ts zh")
_VOWELS = (*"aaaaaeeeeeiiiiooouuuy", *words("aa ai au ay ea ee ei eo ia ie io oa oo ou oy ua ue ui"))
_MIDDLES = (*("",) * 6, *"lmnrst")
_ENDS = (*("",) * 8, *"bcdfgkllmmnnnnprrrsssttwxz", *words("ck ff ld ll nd ng nn ns nt rd rk rn rt sh ss st th tt tz"))


def with_made_up_words(example: TaskExample, rng: random.Random, make_word: MakeWord) -> TaskExample:
    """Replace each name, city, good, job and thing in the prompt by a made-up word, and likewise in later messages."""
    made_up: dict[str, str] = {}

    def replaced(match: re.Match[str]) -> str:
        word = match[0]
        if word not in made_up:
            new_word = make_word(rng)
            made_up[word] = new_word.capitalize() if word[0].isupper() else new_word
        return made_up[word]

    def again(text: str) -> str:
        return _WORDS.sub(lambda match: made_up.get(match[0], match[0]), text)

    return replace(
        example,
        prompt=_WORDS.sub(replaced, example.prompt),
        after=tuple(message | {"content": again(message["content"])} for message in example.after),
        response=again(example.response),
    )


def syllables(rng: random.Random) -> str:
    """Make a pronounceable word with one to four syllables."""
    word = ""
    while not _LETTERS[0] <= len(word) <= _LETTERS[1]:
        count = rng.choices((1, 2, 3, 4), (2, 5, 4, 1))[0]
        onsets = (rng.choice(_CLUSTERS if rng.random() < 0.2 else _ONSETS) for _ in range(count))
        rest = [rng.choice(_VOWELS) + rng.choice(_MIDDLES) for _ in range(count - 1)]
        rest.append(rng.choice(_VOWELS) + rng.choice(_ENDS))
        word = "".join(onset + vowel for onset, vowel in zip(onsets, rest, strict=True))
    return word


def spliced(rng: random.Random) -> str:
    """Make a word from syllables, or from one to three pieces of other words.

    Such pieces are often whole tokens, as they are in real names: Florence begins with "flo" and ends with "ence".
    """
    if rng.random() < 0.4:
        return syllables(rng)
    word = ""
    while not _LETTERS[0] <= len(word) <= _LETTERS[1]:
        word = "".join(_piece(rng) for _ in range(rng.choices((1, 2, 3), (1, 4, 3))[0]))
    return word


def _piece(rng: random.Random) -> str:
    word = rng.choice(_PARTS).lower()
    length = rng.randint(2, 5)
    start = rng.randint(0, max(0, len(word) - length))
    return word[start : start + length]

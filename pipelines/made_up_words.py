"""Replace words of the task families by made-up words, so that a model learns to copy words it has never seen."""

import random
import re
from dataclasses import replace

from mars_ray.data.tasks.family import TaskExample
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES, GOODS, THINGS, words

_WORDS = re.compile(rf"\b(?:{'|'.join((*FIRST_NAMES, *CITIES, *GOODS, *THINGS))})\b")
# Common letters are repeated, so that the words look like names.
_ONSETS = (*"bbccddffghhjjkkllllmmmmnnnnppqrrrrssssttttvvwxyz", *("",) * 6)
_CLUSTERS = words("bl br ch cl cr dr fl fr gh gl gr kh kr ng ph pl pr qu sh sk sl sm sp st str th tr ts zh")
_VOWELS = (*"aaaaaeeeeeiiiiooouuuy", *words("aa ai au ay ea ee ei eo ia ie io oa oo ou oy ua ue ui"))
_MIDDLES = (*("",) * 6, *"lmnrst")
_ENDS = (*("",) * 8, *"bcdfgkllmmnnnnprrrsssttwxz", *words("ck ff ld ll nd ng nn ns nt rd rk rn rt sh ss st th tt tz"))


def with_made_up_words(example: TaskExample, rng: random.Random) -> TaskExample:
    """Replace each name, city, good and thing in the prompt by a made-up word, and likewise in the response."""
    made_up: dict[str, str] = {}

    def replaced(match: re.Match[str]) -> str:
        word = match[0]
        if word not in made_up:
            made_up[word] = made_up_word(rng, capital=word[0].isupper())
        return made_up[word]

    return replace(
        example,
        prompt=_WORDS.sub(replaced, example.prompt),
        response=_WORDS.sub(lambda match: made_up.get(match[0], match[0]), example.response),
    )


def made_up_word(rng: random.Random, *, capital: bool) -> str:
    """Return a pronounceable word with one to four syllables and 2 to 12 letters."""
    word = ""
    while not 2 <= len(word) <= 12:
        syllables = rng.choices((1, 2, 3, 4), (2, 5, 4, 1))[0]
        onsets = (rng.choice(_CLUSTERS if rng.random() < 0.2 else _ONSETS) for _ in range(syllables))
        rest = [rng.choice(_VOWELS) + rng.choice(_MIDDLES) for _ in range(syllables - 1)]
        rest.append(rng.choice(_VOWELS) + rng.choice(_ENDS))
        word = "".join(onset + vowel for onset, vowel in zip(onsets, rest, strict=True))
    return word.capitalize() if capital else word

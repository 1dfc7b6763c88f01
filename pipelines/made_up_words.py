"""Put made-up words in the place of the task families' words, so that a model learns to copy words it has never seen."""

import random
import re
from dataclasses import replace

from mars_ray.data.tasks.family import TaskExample
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES, GOODS, THINGS

_WORDS = re.compile(rf"\b(?:{'|'.join((*FIRST_NAMES, *CITIES, *GOODS, *THINGS))})\b")
# Frequent letters come more often, so that the words read like names.
_ONSETS = (*"bbccddffghhjjkkllllmmmmnnnnppqrrrrssssttttvvwxyz", *("",) * 6)
_CLUSTERS = tuple("bl br ch cl cr dr fl fr gh gl gr kh kr ng ph pl pr qu sh sk sl sm sp st str th tr ts zh".split())
_VOWELS = (*"aaaaaeeeeeiiiiooouuuy", *"aa ai au ay ea ee ei eo ia ie io oa oo ou oy ua ue ui".split())
_MIDDLES = (*("",) * 6, *"lmnrst")
_ENDS = (*("",) * 8, *"bcdfgkllmmnnnnprrrsssttwxz", *"ck ff ld ll nd ng nn ns nt rd rk rn rt sh ss st th tt tz".split())


def with_made_up_words(example: TaskExample, rng: random.Random) -> TaskExample:
    """Replace each name, city, good and thing of the prompt by a made-up word, in the response too."""
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
    """Return a word of one to four syllables and 2 to 12 letters that can be said aloud."""
    word = ""
    while not 2 <= len(word) <= 12:
        syllables = rng.choices((1, 2, 3, 4), (2, 5, 4, 1))[0]
        onsets = (rng.choice(_CLUSTERS if rng.random() < 0.2 else _ONSETS) for _ in range(syllables))
        rest = [rng.choice(_VOWELS) + rng.choice(_MIDDLES) for _ in range(syllables - 1)]
        rest.append(rng.choice(_VOWELS) + rng.choice(_ENDS))
        word = "".join(onset + vowel for onset, vowel in zip(onsets, rest, strict=True))
    return word.capitalize() if capital else word

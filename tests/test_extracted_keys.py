"""The bundled model extracts the keys that a prompt asks for, and no others."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest

from mars_ray import LLM, SamplingParams
from mars_ray.data.tasks import FAMILIES, examples, is_right_answer

EXAMPLES = 200
SAMPLING = SamplingParams(max_tokens=96)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("bundled") as opened:
        yield opened


@pytest.mark.parametrize("threshold", [1.0, 0.95])
def test_two_three_and_four_keys_of_held_out_sentences_are_right(llm: LLM, threshold: float) -> None:
    held_out = list(islice(examples(FAMILIES["json_extract"], "heldout", 22), EXAMPLES))
    answers = llm.chat([example.prompt for example in held_out], SAMPLING, threshold=threshold)
    wrong = {
        example.prompt: answer.text
        for example, answer in zip(held_out, answers, strict=True)
        if not is_right_answer(example.family, example.answer, answer.text)
    }
    assert Counter(len(json.loads(example.answer)) for example in held_out).keys() == {2, 3, 4}
    assert len(wrong) <= 0.05 * EXAMPLES, wrong


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("JSON with the keys name, city: Ada lives in London.", '{"name": "Ada", "city": "London"}'),
        ("JSON with the keys city, name: Ada lives in London.", '{"city": "London", "name": "Ada"}'),
        ("Extract city and age as JSON: Priya, 27, lives in Chennai.", '{"city": "Chennai", "age": 27}'),
        ("json with the keys name, city: Bob lives in Helsinki", '{"name": "Bob", "city": "Helsinki"}'),
    ],
)
def test_keys_of_names_outside_the_lexicon_come_in_the_order_of_the_prompt(llm: LLM, prompt: str, answer: str) -> None:
    assert llm.chat(prompt, SAMPLING)[0].text == answer

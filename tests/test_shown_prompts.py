"""The bundled model answers the prompts in README, guides, the hint of `serve` and the playground right."""

import re
from pathlib import Path

import pytest

from mars_ray import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
RIGHT = {
    "JSON with the keys name, age, city: Oscar, 34, lives in Dallas.": '{"name": "Oscar", "age": 34, "city": "Dallas"}',
    "Diana, Rita, Grace: put them in a numbered list.": "1. Diana\n2. Rita\n3. Grace",
    "Change the date format to day month year: 2037-12-17": "17 December 2037",
}


def shown_prompts() -> set[str]:
    """Return texts of five words and more in programs of the pages, and prompts of playground and `serve`."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text() for page in pages)
    programs = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    return {
        *(prompt for prompt in re.findall(r'"([A-Z][^"\n]*)"', programs) if len(prompt.split()) >= 5),
        *re.findall(r'id="prompt".*placeholder="([^"]*)"', (ROOT / "mars_ray/web/playground.html").read_text()),
        *re.findall(r'"content": "([^"]*)"', (ROOT / "mars_ray/serve/ray/run_endpoint.py").read_text()),
    }


def test_every_shown_prompt_has_its_answer_here() -> None:
    assert shown_prompts() == set(RIGHT)


@pytest.mark.parametrize("threshold", [1.0, 0.95, 0.9])
def test_every_shown_prompt_is_answered_right(threshold: float) -> None:
    answers = LLM("bundled").chat(list(RIGHT), SamplingParams(max_tokens=64), threshold=threshold)
    assert dict(zip(RIGHT, (answer.text for answer in answers), strict=True)) == RIGHT

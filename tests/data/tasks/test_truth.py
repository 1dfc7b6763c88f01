"""The slow twins: each answer is worked out again from the text of the prompt alone."""

import json
import random
import re
from collections.abc import Iterator
from datetime import datetime
from fractions import Fraction
from itertools import permutations

import pytest

from mars_ray.data.tasks import FAMILIES, TaskExample
from mars_ray.data.tasks.lexicon import CITIES, COLOURS, DAYS, FIRST_NAMES, JOBS, MONTHS, TEAMS, THINGS


def made(name: str, count: int = 400) -> Iterator[TaskExample]:
    rng = random.Random(f"truth/{name}")
    return (FAMILIES[name].make(rng) for _ in range(count))


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def test_sorted_numbers_are_those_of_the_prompt_in_the_order_it_asks_for() -> None:
    for each in made("sort_numbers"):
        downwards = re.search("largest to|descending|highest", each.prompt) is not None
        assert numbers(each.response) == sorted(numbers(each.prompt), reverse=downwards)
        assert len(set(numbers(each.prompt))) in (5, 6)


def test_a_sum_adds_all_numbers_of_the_prompt_and_stays_below_100() -> None:
    for each in made("sum_direct"):
        assert int(each.response) == sum(numbers(each.prompt)) <= 99


def test_a_walk_takes_six_to_eight_links_and_ends_where_the_prompt_says() -> None:
    for each in made("follow_links"):
        onward = dict(re.findall(r"(\d)>(\d)", each.prompt))
        start, end = re.findall(r"\d", re.sub(r"\d>\d", "", each.prompt))
        walk = start
        while walk[-1] != end:
            walk += onward[walk[-1]]
        assert each.response == walk
        assert 8 <= len(onward) <= 10 and 6 <= len(walk) - 1 <= 8


def test_the_steps_of_a_word_problem_use_its_numbers_in_turn_and_stay_below_100() -> None:
    for each in made("word_problem"):
        first, second, last = each.response.split("\n")
        x, y, s1 = numbers(first)
        carried, z, s2 = numbers(second)
        assert [x, y, z] == numbers(each.prompt)
        assert carried == s1 and last == f"Answer: {s2}" and each.answer == str(s2)
        assert 0 < s1 < 100 and 0 < s2 < 100


@pytest.mark.parametrize(
    ("operators", "words"),
    [
        ("+-", "more and (gives|sells)"),
        ("-+", "(loses|sells).*(finds|gets)"),
        ("*-", "boxes .* sells"),
        ("*+", "packs .*more"),
    ],
)
def test_the_story_of_a_word_problem_means_its_operators(operators: str, words: str) -> None:
    found = [e for e in made("word_problem") if "".join(re.findall(r" ([-+*]) ", e.response)) == operators]
    assert len(found) > 50
    assert all(re.search(words, each.prompt) for each in found)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Answer: 14", True),
        ("12 + 7 = 19\n19 - 5 = 14\nAnswer: 14", True),
        ("2 * 7 = 14\nAnswer: 14", True),
        ("12 + 7 = 18\n19 - 5 = 14\nAnswer: 14", False),
        ("12 + 7 = 19\n19 - 5 = 14\nAnswer: 15", False),
        ("12 + 7 = 19\n19 - 5 = 14", False),
        ("twelve and seven\nAnswer: 14", False),
        ("Answer: 14\n19 - 5 = 14", False),
        ("012 + 2 = 14\nAnswer: 14", False),
        pytest.param("1 + 1 = " + "9" * 5000 + "\nAnswer: 14", False, id="more digits than int() reads"),
    ],
)
def test_a_word_problem_needs_the_right_last_line_and_only_true_steps(text: str, right: bool) -> None:
    assert FAMILIES["word_problem"].verify("14", text) is right


SIZES = {  # in metres, kilograms, litres and minutes
    **{"km": Fraction(1000), "m": Fraction(1), "cm": Fraction(1, 100), "mm": Fraction(1, 1000)},
    **{"t": Fraction(1000), "kg": Fraction(1), "g": Fraction(1, 1000), "mg": Fraction(1, 10**6)},
    **{"l": Fraction(1), "ml": Fraction(1, 1000)},
    **{"s": Fraction(1, 60), "min": Fraction(1), "h": Fraction(60), "days": Fraction(1440), "weeks": Fraction(10080)},
}


def test_both_sides_of_a_conversion_are_the_same_size_and_named_in_the_prompt() -> None:
    for each in made("unit_convert"):
        value, unit, equals, result, target = each.response.split(" ")
        assert equals == "=" and re.search(rf"(?<![\d.]){re.escape(value)} {unit}\b", each.prompt)
        assert Fraction(value) * SIZES[unit] == Fraction(result) * SIZES[target]
        assert re.search(rf" (to|in) {target}\b", each.prompt)
        assert not re.search(r"\.\d*0( |$)", each.response)


@pytest.mark.parametrize("pair", [("kg", "g"), ("km", "m"), ("h", "min"), ("weeks", "days")])
def test_conversions_are_asked_for_in_both_directions(pair: tuple[str, str]) -> None:
    units = {tuple(each.response.split(" ")[1::3]) for each in made("unit_convert")}
    assert {pair, pair[::-1]} <= units


def as_date(text: str) -> datetime:
    (found,) = re.findall(r"\d{4}-\d\d-\d\d|\d\d/\d\d/\d{4}|\d+ [A-Z][a-z]+ \d{4}", text)
    form = "%Y-%m-%d" if "-" in found else "%m/%d/%Y" if "/" in found else "%d %B %Y"
    return datetime.strptime(found, form)


def test_a_rewritten_date_is_the_same_day_in_the_form_named() -> None:
    shapes = {
        "YYYY-MM-DD": r"\d{4}-\d\d-\d\d",
        "MM/DD/YYYY": r"\d\d/\d\d/\d{4}",
        "day month year": r"[1-9]\d? \w+ \d{4}",
    }
    for each in made("date_rewrite"):
        assert as_date(each.prompt) == as_date(each.response)
        (shape,) = (shape for form, shape in shapes.items() if form in each.prompt)
        assert re.fullmatch(shape, each.response)


def test_a_list_has_the_items_of_the_prompt_in_the_style_it_names() -> None:
    for each in made("list_format"):
        lines = each.response.split("\n")
        items = [line.split(" ", 1)[1] for line in lines]
        assert ", ".join(items) in each.prompt and 3 <= len(items) <= 5
        marks = ["-"] * len(items) if "bulleted" in each.prompt else [f"{n}." for n in range(1, len(items) + 1)]
        assert lines == [f"{mark} {item}" for mark, item in zip(marks, items, strict=True)]


def leaves(value: object) -> list[str]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in (key, *leaves(inner))]
    return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, list) else [str(value)]


@pytest.mark.parametrize("name", ["json_extract", "csv_to_json"])
def test_every_key_and_value_of_the_json_stands_in_the_prompt(name: str) -> None:
    for each in made(name):
        assert "\n" not in each.response
        assert all(
            re.search(rf"(?<![A-Za-z0-9]){leaf}(?![A-Za-z0-9])", each.prompt)
            for leaf in leaves(json.loads(each.response))
        )


def test_an_extracted_value_is_of_the_kind_its_key_names() -> None:
    kinds = {"name": FIRST_NAMES, "city": CITIES, "item": THINGS, "job": JOBS, "day": DAYS, "month": MONTHS}
    kinds |= {"team": TEAMS, "color": COLOURS}
    for each in made("json_extract"):
        for key, value in json.loads(each.response).items():
            if key == "time":
                assert re.fullmatch(r"\d\d:\d\d", value)
            else:
                assert value.split()[-1] in kinds[key] if key in kinds else type(value) is int


def test_two_to_four_keys_are_extracted_in_the_order_of_the_prompt() -> None:
    prompts = list(made("json_extract"))
    for example in prompts:
        listed = r"(?:, | and )".join(json.loads(example.response))
        assert re.search(rf"(?<!, )\b{listed}\b(?! and|, )", example.prompt), example.prompt
    assert {len(json.loads(example.response)) for example in prompts} == {2, 3, 4}


def test_keys_are_asked_for_in_every_order_and_of_sentences_with_more_facts() -> None:
    orders = {tuple(json.loads(example.response)) for example in made("json_extract", 4000)}
    assert set(permutations(("name", "age", "city"))) <= orders
    assert set(permutations(("name", "age", "city"), 2)) <= orders


def test_every_cell_of_the_row_stands_in_the_sentence() -> None:
    for each in made("table_to_text"):
        header, row = (line.split("|") for line in each.prompt.split("\n") if "|" in line)
        assert len(header) == len(row) and all(cell in each.response for cell in row)


def test_every_fact_of_a_message_stands_in_it() -> None:
    for each in made("message_fill"):
        facts = re.findall(r"(?:name|visit|goods|guests|day|time|city): ([A-Za-z]+|[\d:]+\d|\d+)", each.prompt)
        assert len(facts) == 4 and all(fact in each.response for fact in facts)

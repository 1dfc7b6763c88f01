import random
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mars_ray.data.tasks import FAMILIES, Family, TaskExample, is_right_answer

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
DRAWS = 6000


@cache
def drawn(name: str) -> list[TaskExample]:
    rng = random.Random(f"test/{name}")
    return [FAMILIES[name].make(rng) for _ in range(DRAWS)]


def test_there_are_nine_easy_and_four_hard_families_in_order() -> None:
    assert list(FAMILIES) == [
        *("json_extract", "table_to_text", "csv_to_json", "list_format"),
        *("word_problem", "unit_convert", "date_rewrite", "message_fill", "tool_call"),
        *("sort_numbers", "sum_direct", "follow_links", "rephrase"),
    ]
    assert [family.kind for family in FAMILIES.values()] == ["easy"] * 9 + ["hard"] * 4
    assert all(name == family.name for name, family in FAMILIES.items())


def test_the_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        FAMILIES["json_extract"] = FAMILIES["rephrase"]  # type: ignore[index]


@EACH
def test_every_made_response_is_right(family: Family) -> None:
    assert all(is_right_answer(family.name, each.answer, each.response) for each in drawn(family.name))
    assert {each.family for each in drawn(family.name)} == {family.name}


@EACH
def test_white_space_around_a_response_is_forgiven(family: Family) -> None:
    made = drawn(family.name)[0]
    assert is_right_answer(family.name, made.answer, f" {made.response}\n")


@EACH
def test_the_response_to_another_prompt_is_wrong(family: Family) -> None:
    first, *others = drawn(family.name)[:50]
    assert not any(is_right_answer(family.name, first.answer, o.response) for o in others if o.answer != first.answer)


# Letters and digits carry the meaning in every family. "A" and "1" are left out: swapping them turns one right
# wording of `rephrase` into another.
EDIT_CHARACTERS = "023456789bcdefghijklmnopqrstuvwxyzBCDEFGHIJKLMNOPQRSTUVWXYZ"


@EACH
@given(
    index=st.integers(0, DRAWS - 1),
    where=st.floats(0, 1, exclude_max=True),
    edit=st.sampled_from(("replace", "delete", "insert")),
    character=st.sampled_from(EDIT_CHARACTERS),
)
def test_one_letter_or_digit_changed_makes_a_response_wrong(
    family: Family, index: int, where: float, edit: str, character: str
) -> None:
    made = drawn(family.name)[index]
    places = [place for place, letter in enumerate(made.response) if letter.isalnum()]
    place = places[int(where * len(places))]
    kept_from = place if edit == "insert" else place + 1
    edited = made.response[:place] + ("" if edit == "delete" else character) + made.response[kept_from:]
    assert edited == made.response or not is_right_answer(family.name, made.answer, edited)


@EACH
@given(text=st.text(max_size=60))
@example(text="")
@example(text="[" * 100_000)
@example(text="9" * 5_000)
@example(text="{" + '"a": ' * 10)
@example(text="Answer: \u00b2\nAnswer: \ud800")
def test_any_text_is_judged_without_an_error(family: Family, text: str) -> None:
    assert is_right_answer(family.name, drawn(family.name)[0].answer, text) is False


@EACH
def test_the_same_generator_state_makes_the_same_example(family: Family) -> None:
    assert [family.make(random.Random(5)) for _ in range(3)] == [family.make(random.Random(5))] * 3


@EACH
def test_there_are_at_least_50_000_prompts(family: Family) -> None:
    # 6,000 fair draws from 50,000 prompts meet 50,000 x (1 - exp(-6,000 / 50,000)) = 5,654 different ones.
    assert len({each.prompt for each in drawn(family.name)}) > 5654


@EACH
def test_prompts_and_responses_are_short_plain_ascii(family: Family) -> None:
    shortest = {"sum_direct": 1, "follow_links": 7}.get(family.name, 8)
    shortest_prompt = {"tool_call": 20, "json_extract": 25}.get(family.name, 40)
    for each in drawn(family.name):
        assert each.prompt.isascii() and each.response.isascii()
        assert shortest_prompt <= len(each.prompt) <= 200
        assert shortest <= len(each.response) <= 130
        assert each.response == each.response.strip() and each.prompt == each.prompt.strip()

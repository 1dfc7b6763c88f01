"""Bodies as hostile as JSON allows cost no more than their size."""

import json
import tracemalloc

import pytest

from mars_ray.openai_api.api_error import ApiError
from mars_ray.serve.middleware.json_body import parse

DEPTH = 900


@pytest.mark.parametrize("half", ["\\\\ud83d", "\\ud83d\\ude00", "x"], ids=["looks like half", "pair", "none"])
def test_a_body_that_is_deep_and_wide_takes_memory_for_its_items_and_not_for_their_places(half: str) -> None:
    items = ",".join(["0"] * 100_000)
    body = ("[" * DEPTH + f'"{half}",{items}' + "]" * DEPTH).encode()
    tracemalloc.start()
    try:
        parse(body)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('"\\ud83d"', "the body"),
        ('{"a": {"b": ["x", "\\ud83d"]}}', "a.b.1"),
        ('{"a": "x\\ude00"}', "a"),
        ('{"a": {"\\ud83d": 1}}', "a"),
        ('{"a": "\\ud83d\\ude00 \\ud83d"}', "a"),
    ],
)
def test_half_a_character_is_named_by_its_place(body: str, place: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(body.encode())
    assert raised.value.body()["error"]["message"].startswith(f"{place} holds")


def test_an_escaped_backslash_before_what_looks_like_half_a_character_is_taken() -> None:
    assert parse(b'{"a": "\\\\ud83d"}') == {"a": json.loads('"\\\\ud83d"')}

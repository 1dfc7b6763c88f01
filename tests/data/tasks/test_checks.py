import pytest

from mars_ray.data.tasks.checks import same_json, same_text


@pytest.mark.parametrize("text", ['{"a": 1, "b": [2, 3]}', ' {"b":[2,3],"a":1}\n'])
def test_key_order_and_spacing_of_json_are_free(text: str) -> None:
    assert same_json('{"a": 1, "b": [2, 3]}', text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1.0, "b": [2, 3]}',
        '{"a": true, "b": [2, 3]}',
        '{"a": "1", "b": [2, 3]}',
        '{"a": 1, "b": [3, 2]}',
        '{"a": 1, "b": [2, 3], "c": 4}',
        '{"a": 9, "a": 1, "b": [2, 3]}',
        '{"a": 1, "b": [2, 3]} and more',
        '{"a": 1, "b": [2, 3]',
        "NaN",
    ],
)
def test_json_of_another_value_or_form_is_refused(text: str) -> None:
    assert not same_json('{"a": 1, "b": [2, 3]}', text)


def test_only_white_space_around_a_text_is_free() -> None:
    assert same_text("1 km = 1000 m", "\n1 km = 1000 m ")
    assert not same_text("1 km = 1000 m", "1 km  = 1000 m")
    assert not same_text("1 km = 1000 m", "1 km = 1000 m.")

"""What is a row, and what is said about one that is none."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.batch.rows import Row, given_id, parse_row
from mars_ray.errors import BadRecordError

USER = {"role": "user", "content": "why?"}
ASSISTANT = {"role": "assistant", "content": "so."}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
almost_rows = st.fixed_dictionaries(
    {}, optional={"id": json_values, "prompt": json_values, "messages": json_values | st.just([USER])}
)


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_prompt_is_one_message_of_the_user() -> None:
    assert parse_row(raw(id="a1", prompt="why?")) == Row(id="a1", prompt="why?", messages=(USER,))


def test_of_a_conversation_the_last_question_is_shown() -> None:
    system = {"role": "system", "content": "be brief"}
    row = parse_row(raw(id=7, messages=[system, USER, ASSISTANT, USER | {"content": "really?"}]))
    assert (row.id, row.prompt, len(row.messages)) == ("7", "really?", 4)


def test_a_conversation_may_end_with_what_a_tool_returned() -> None:
    row = parse_row(raw(messages=[USER, ASSISTANT, {"role": "tool", "content": "42"}]))
    assert (row.prompt, row.messages[-1]["content"]) == ("why?", "42")


def test_a_column_that_is_null_is_one_that_is_not_there() -> None:
    assert parse_row(raw(id="a", messages=None, prompt="why?")).messages == (USER,)
    assert parse_row(raw(id="a", messages=[USER], prompt=None)).messages == (USER,)


def test_without_an_id_the_same_content_has_the_same_id() -> None:
    one, same, other = (
        parse_row(text)
        for text in (b'{"prompt": "x", "n": 1}', b'{ "n": 1, "id": null, "prompt": "x" }', raw(prompt="x", n=2))
    )
    assert len(one.id) == 16
    assert one.id != other.id
    assert parse_row(b'{"n":1,"prompt":"x"}').id == one.id
    assert given_id(b'{"prompt": "x"}') is None
    assert same.prompt == one.prompt


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{oops", "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b"[1]", "not a JSON object"),
        (raw(text="x"), "neither 'prompt' nor 'messages'"),
        (raw(prompt=None), "neither 'prompt' nor 'messages'"),
        (raw(prompt=3), "'prompt' must be text, not int 3"),
        (raw(prompt=" \n"), "prompt is empty"),
        (raw(messages=[]), "at least one message"),
        (raw(messages=[USER, ASSISTANT]), "nothing left to answer"),
        (raw(messages=[USER | {"role": "robot"}]), "role 'robot'"),
        (raw(prompt="x", id=[1]), "'id' must be text or an integer, not list"),
        (raw(prompt="x", id=True), "'id' must be text or an integer, not bool"),
        (b'{"prompt": "\\ud800"}', "not Unicode"),
        (b'{"prompt": "x", "id": "\\ud800"}', "not Unicode"),
    ],
)
def test_a_bad_row_is_refused_with_the_reason(text: bytes, reason: str) -> None:
    with pytest.raises(BadRecordError, match=reason):
        parse_row(text)


def test_the_id_of_a_bad_row_is_found_when_it_has_a_usable_one() -> None:
    assert given_id(raw(id=7, prompt=3)) == "7"
    assert [given_id(text) for text in (b"{oops", raw(id=[1]), b'{"id": "\\ud800"}', raw(id=""))] == [None] * 4


@given(st.binary() | almost_rows.map(lambda fields: json.dumps(fields).encode()))
def test_whatever_comes_in_a_row_or_a_reason_comes_out(text: bytes) -> None:
    try:
        row = parse_row(text)
    except BadRecordError as error:
        assert str(error)
        assert given_id(text) is None or given_id(text)
    else:
        assert row.id
        assert row.messages[-1]["role"] != "assistant"
        "".join((row.id, row.prompt)).encode()


@pytest.mark.parametrize("depth", [500, 5_000, 100_000])
def test_a_row_nested_without_end_is_refused(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    for text in (b'{"prompt": ' + nested + b"}", b'{"messages": [' + nested + b"]}", b'{"id": ' + nested + b"}"):
        with pytest.raises(BadRecordError):
            parse_row(text)
        assert given_id(text) is None

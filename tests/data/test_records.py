import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.data.prompt_file import prompt_of
from mars_ray.data.records import Record, parse_object, parse_record
from mars_ray.errors import BadRecordError, RequestError

SAID = {"role": "assistant", "content": "b"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "prompt", "response", "role", "content"]), inner)
    ),
    max_leaves=12,
)


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_prompt_and_a_response_are_a_conversation_of_two_turns() -> None:
    assert parse_record(raw(prompt="a", response="b", source="x")) == Record(({"role": "user", "content": "a"}, SAID))


def test_fields_that_are_null_or_that_clients_add_are_no_part_of_a_message() -> None:
    messages = [{"role": "user", "content": "a", "name": None}, SAID | {"tool_calls": None, "usage": {"tokens": 1}}]
    assert parse_record(raw(messages=messages)) == parse_record(raw(prompt="a", response="b"))


def test_a_column_that_is_null_counts_as_absent() -> None:
    assert parse_record(raw(messages=None, prompt="a", response="b")) == parse_record(raw(prompt="a", response="b"))


def test_a_byte_order_mark_is_no_part_of_the_record() -> None:
    assert parse_record(b"\xef\xbb\xbf" + raw(prompt="a", response="b")) == parse_record(raw(prompt="a", response="b"))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{", "it is not JSON"),
        (b"\xff\xfe{\x00}\x00", "it is not JSON"),
        ('{"prompt": "a", "response": "é"}'.encode("latin-1"), "it is not JSON"),
        (raw(prompt="a", response="b").decode().encode("utf-16"), "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "it is not JSON"),
        (b'["a"]', "it is not a JSON object"),
        (raw(text="a"), "neither 'messages' nor 'prompt' and 'response', only ['text']"),
        (raw(messages=None), "neither 'messages'"),
        (raw(prompt="a", response=None), "it has no 'response'"),
        (raw(prompt=5, response="b"), "'prompt' must be text, not int"),
        (raw(prompt=["a"], response="b"), "messages.0 must be an object"),
        (raw(prompt="a", response=" \n"), "it has no response"),
        (raw(messages=[{"role": "user", "content": "a"}]), "it has no response"),
        (raw(prompt="a", response=None, completion=""), "it has no response"),
        (raw(messages=[SAID, "a"]), "messages.1 must be an object"),
        (raw(messages=[{"role": "assistant", "content": [{"type": "text"}]}]), "messages.0.content.0.text is missing"),
        (raw(messages=[{"role": "assistant", "content": None}]), "it has no response"),
        (raw(messages=[{"role": "bot" * 999, "content": "a"}]), "messages.0 has the unknown 'role' 'bot"),
        (raw(messages=[{"role": ["user"], "content": "a"}]), "role must be text, not ['user']"),
        (raw(messages=[SAID | {"tool_calls": [{"name": "f"}]}]), "messages.0.tool_calls.0"),
        (
            raw(messages=[SAID | {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}]),
            "the arguments of the call 'c' are not a JSON object",
        ),
        (rb'{"prompt": "a\ud800", "response": "b"}', r"prompt holds \ud800, which is only half"),
        (rb'{"messages": [{"role": "assistant", "content": "\udc00"}]}', "messages.0.content holds"),
    ],
)
def test_a_bad_record_says_what_is_wrong_in_one_short_line(bad: bytes, reason: str) -> None:
    with pytest.raises(BadRecordError, match=re.escape(reason)) as caught:
        parse_record(bad)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_the_bytes_are_a_record_or_a_bad_record_comes_out(data: bytes) -> None:
    for parse in (lambda data: parse_record(data).messages, lambda data: prompt_of(parse_object(data))):
        try:
            messages = parse(data)
        except (BadRecordError, RequestError):
            continue
        for message in messages:
            message["content"].encode()


@pytest.mark.parametrize("depth", [200, 201, *range(850, 1000, 10), 100_000])
def test_a_record_may_be_nested_200_levels_deep(depth: int) -> None:
    inside = b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    if depth == 200:
        assert parse_object(inside).keys() == {"a"}
    else:
        with pytest.raises(BadRecordError):
            parse_object(inside)
    assert parse_object(b'{"a": [' + b"[]," * depth + b"[]]}").keys() == {"a"}

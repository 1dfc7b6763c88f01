"""Answers are parted into reasoning, content and calls, whatever the text and wherever it is cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.chat.call_format import CALL_FORMATS, MARKERS, REASONING_FORMATS, CallFormat
from mars_ray.chat.generic_tools import written_calls
from mars_ray.openai_api.answer_parts import ContentPart
from mars_ray.openai_api.call_parser import CallParser
from mars_ray.openai_api.reasoning_parser import ReasoningParser
from tests.openai_api.answer_samples import CALLS, NAMES, PROSE, cut, joined

FORMATS = st.sampled_from(list(CALL_FORMATS.values()))
FRAGMENTS = [
    *sorted(MARKERS),
    '{"name": "f", "arguments": {"a": "}"',
    '{"name": "f", "parameters": {}}',
    "[f(a=1), now()]",
    *('"}', "}", "]", "f(", ")"),
]
PLACES = st.lists(st.integers(0))
MARKED = [CALL_FORMATS["hermes"], CALL_FORMATS["mistral"]]


def parsed(call_format: CallFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = CallParser(call_format, NAMES)
    parts = [part for piece in pieces for part in parser.push(piece)]
    _, content, calls = joined([*parts, *parser.finish()])
    return content, calls


def objects(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@given(call_format=FORMATS, calls=CALLS, places=PLACES)
def test_no_call_is_lost_wherever_the_answer_is_cut(
    call_format: CallFormat, calls: list[tuple[str, Any]], places: list[int]
) -> None:
    content, got = parsed(call_format, cut(written_calls(call_format, calls), places))
    assert (content, objects(got)) == ("", calls)


@given(call_format=st.sampled_from(MARKED), before=PROSE, calls=CALLS, after=PROSE, places=PLACES)
def test_text_around_marked_calls_is_kept(
    call_format: CallFormat, before: str, calls: list[tuple[str, Any]], after: str, places: list[int]
) -> None:
    written = written_calls(call_format, calls)
    content, got = parsed(call_format, cut(f"{before}{written}{after}", places))
    assert objects(got) == calls
    assert content == before.rstrip() + after.lstrip()


@given(call_format=FORMATS, text=st.lists(PROSE | st.sampled_from(FRAGMENTS)).map("".join), places=PLACES)
def test_any_text_gives_the_same_parts_wherever_it_is_cut(
    call_format: CallFormat, text: str, places: list[int]
) -> None:
    assert parsed(call_format, cut(text, places)) == parsed(call_format, [text])


@given(call_format=FORMATS, text=PROSE, places=PLACES)
def test_an_answer_without_calls_is_content_to_the_letter(
    call_format: CallFormat, text: str, places: list[int]
) -> None:
    assert parsed(call_format, cut(text, places)) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', "", [("f", '{"a":1}')]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', "x", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, []),
        ("hermes", "Say <tool_call> twice", "Say <tool_call> twice", []),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("llama3_json", '{"name": "Bob", "age": 5}', None, []),
        ("llama3_json", 'Look: {"name": "f", "parameters": {}}', None, []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "123456789"}]', "", [("f", "{}")]),
        ("pythonic", "[f(a='it\\'s', b=[True, None, -1], c={'x': 1.5})]", "",
         [("f", '{"a": "it\'s", "b": [true, null, -1], "c": {"x": 1.5}}')]),
        ("pythonic", '[f(a="\\/\\ud83d\\ude00")]', "", [("f", '{"a": "\\/\\ud83d\\ude00"}')]),
        ("pythonic", "[1, 2, 3]", None, []),
        ("pythonic", "[f(NaN)]", None, []),
        ("pythonic", "[f(a=NaN)]", None, []),
        ("pythonic", "[f(a=open('x'))]", None, []),
    ],
)  # fmt: skip
def test_calls_are_read_as_models_write_them(
    name: Any, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = (text if content is None else content, calls)
    assert parsed(CALL_FORMATS[name], [text]) == expected
    assert parsed(CALL_FORMATS[name], list(text)) == expected


def test_arguments_are_streamed_before_the_call_has_ended() -> None:
    parser = CallParser(CALL_FORMATS["hermes"], NAMES)
    parts = [*parser.push('Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "some')]
    assert joined(parts) == ("", "Well.", [("f", '{"a": "some')])


@pytest.mark.parametrize("form", REASONING_FORMATS.values())
@pytest.mark.parametrize("begun", [True, False])
@given(reasoning=PROSE, answer=PROSE, places=PLACES)
def test_reasoning_is_parted_from_the_answer(
    form: Any, begun: bool, reasoning: str, answer: str, places: list[int]
) -> None:
    parser = ReasoningParser(form, begun=begun)
    text = f"{'' if begun else form.begin}\n{reasoning}\n{form.end}\n\n{answer}"
    parts = [part for piece in cut(text, places) for part in parser.push(piece)]
    assert joined([*parts, *parser.finish()])[:2] == (reasoning.strip(), answer.lstrip())


@given(text=PROSE, places=PLACES)
def test_an_answer_without_reasoning_is_content_to_the_letter(text: str, places: list[int]) -> None:
    parser = ReasoningParser(REASONING_FORMATS["deepseek_r1"], begun=False)
    parts = [part for piece in cut(text, places) for part in parser.push(piece)]
    assert joined([*parts, *parser.finish()]) == ("", text, [])


def test_reasoning_that_is_cut_short_stays_reasoning() -> None:
    parser = ReasoningParser(REASONING_FORMATS["deepseek_r1"], begun=True)
    parts = [*parser.push("So far, </thi"), *parser.finish()]
    assert joined(parts) == ("So far, </thi", "", [])
    assert ContentPart("") not in parts

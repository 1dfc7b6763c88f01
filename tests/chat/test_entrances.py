"""What one entrance takes of a conversation all take, and they refuse the rest with the same words."""

import json
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.entrances import ENTRANCES, WITH_TOOLS, outcome

USER: dict[str, Any] = {"role": "user", "content": "Add 1 and 2."}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "3"}
OBJECT = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}

TAKEN: dict[str, list[dict[str, Any]]] = {
    "text": [USER],
    "parts": [USER | {"content": [{"type": "text", "text": "Add 1"}, {"type": "text", "text": " and 2."}]}],
    "part with cache_control": [USER | {"content": [{"type": "text", "text": "a", "cache_control": {"type": "e"}}]}],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "name": [USER | {"name": "Ada"}],
    "null fields": [USER | {"name": None, "tool_calls": None}],
    "calls and results": [USER, CALLED, RESULT],
    "calls, results and a question": [USER, CALLED, RESULT, {"role": "assistant", "content": "3"}, USER],
    "call without ids, its arguments an object": [
        USER,
        {"role": "assistant", "tool_calls": [OBJECT]},
        {"role": "tool", "name": "add", "content": "3"},
    ],
    "two calls without ids": [
        USER,
        CALLED | {"tool_calls": [OBJECT, OBJECT]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ],
    "older form of a call": [
        USER,
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "add", "content": "3"},
    ],
    "call in the text": [USER, {"role": "assistant", "content": "add(1, 2)"}, {"role": "tool", "content": "3"}],
    "empty result": [USER, CALLED, RESULT | {"content": ""}],
    "result without parts": [USER, CALLED, RESULT | {"content": []}],
    "answer without parts": [USER, CALLED | {"content": []}, RESULT],
    "no calls in any message": [
        {"role": "system", "content": "Be brief.", "tool_calls": []},
        USER | {"tool_calls": []},
        CALLED,
        RESULT | {"tool_calls": []},
    ],
    "call without a type": [USER, CALLED | {"tool_calls": [{"id": "c", "function": CALL["function"]}]}, RESULT],
    "call whose type is null": [USER, CALLED | {"tool_calls": [CALL | {"type": None}]}, RESULT],
    "refusal next to empty content": [USER, {"role": "assistant", "content": "", "refusal": "No."}, USER],
    "refusal next to an empty part": [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": ""}], "refusal": "No."},
        USER,
    ],
    "content next to an empty refusal": [USER, {"role": "assistant", "content": "3", "refusal": ""}, USER],
    "refusal": [USER, {"role": "assistant", "content": None, "refusal": "No."}, USER],
    "refusal as a part": [
        USER,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        USER,
    ],
    "reasoning": [USER, {"role": "assistant", "content": "3", "reasoning_content": "1 + 2"}, USER],
    "what a client parsed": [
        USER,
        CALLED | {"parsed": {"a": 1}, "tool_calls": [CALL | {"index": 0}], "annotations": [], "audio": None},
        RESULT,
    ],
}
REFUSED: dict[str, tuple[Any, str]] = {
    "no list": ({"role": "user"}, "messages must be a list"),
    "empty list": ([], "messages must have at least 1 item"),
    "text in the list": (["a"], "messages.0 must be an object"),
    "no content": ([{"role": "user"}], "messages.0.content is missing"),
    "null content of a user": ([{"role": "user", "content": None}], "messages.0.content is missing"),
    "number": ([{"role": "user", "content": 5}], "messages.0.content must be text or a list"),
    "empty content": ([{"role": "user", "content": []}], "messages.0.content is empty; it must be text, or have"),
    "calls of a user": ([USER | {"tool_calls": [CALL]}], "unknown parameter 'messages.0.tool_calls'"),
    "call of another type": (
        [USER, CALLED | {"tool_calls": [CALL | {"type": "custom"}]}, RESULT],
        "messages.1.tool_calls.0.type must be 'function'",
    ),
    "refusal that is no text": (
        [USER, {"role": "assistant", "content": None, "refusal": 0}, USER],
        "messages.1.content must be text or a list",
    ),
    "no role": ([{"content": "a"}], "messages.0 needs 'role'"),
    "unknown role": ([{"role": "bot", "content": "a"}], "messages.0 has the unknown 'role' 'bot'"),
    "image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        "content of type 'image_url' is not supported; only text is",
    ),
    "sound after a text": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}],
        "content of type 'input_audio' is not supported; only text is",
    ),
    "misspelt field": ([USER | {"nmae": "Ada"}], "unknown parameter 'messages.0.nmae'"),
    "misspelt field of a call": (
        [USER, CALLED | {"tool_calls": [CALL | {"idd": "c"}]}, RESULT],
        "unknown parameter 'messages.1.tool_calls.0.idd'",
    ),
    "pictures of a user": ([USER | {"images": ["a"]}], "unknown parameter 'messages.0.images'"),
    "call without a result": ([USER, CALLED, USER], "the call 'c' has no result"),
    "result without its call": ([USER, RESULT], "the result of a call 'c' has no call with this id"),
    "result of nothing": ([USER, {"role": "tool", "content": "3"}], "messages.1.tool_call_id is missing"),
    "two calls with one id": ([USER, CALLED | {"tool_calls": [CALL, CALL]}, RESULT], "an answer has two calls"),
    "both forms of a call": (
        [USER, CALLED | {"function_call": CALL["function"]}, RESULT],
        "a message has either tool_calls or function_call",
    ),
    "audio": ([USER, {"role": "assistant", "audio": {"id": "a"}}, USER], "messages with audio are not supported"),
    "content and refusal": (
        [USER, {"role": "assistant", "content": "a", "refusal": "b"}, USER],
        "a message has either content or refusal",
    ),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("name", TAKEN)
def test_what_one_entrance_takes_all_take_with_the_same_tokens(name: str, entrance: str) -> None:
    tokens = outcome(ENTRANCES["request"], TAKEN[name])
    assert isinstance(tokens, tuple), tokens
    assert outcome(ENTRANCES[entrance], TAKEN[name]) == tokens


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_one_entrance_refuses_all_refuse_with_the_same_words(name: str, entrance: str) -> None:
    messages, words = REFUSED[name]
    refusal = outcome(ENTRANCES["request"], messages)
    assert isinstance(refusal, str) and refusal.startswith(words)
    assert outcome(ENTRANCES[entrance], messages) == refusal


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_with_tools_conversations_are_taken_and_refused_alike(name: str) -> None:
    messages = TAKEN[name] if name in TAKEN else REFUSED[name][0]
    first, *others = (outcome(entrance, messages) for entrance in WITH_TOOLS.values())
    assert others == [first] * len(others)
    assert isinstance(first, tuple) == (name in TAKEN)


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_the_endpoint_takes_and_refuses_the_same_over_http(plain: httpx2.Client, name: str) -> None:
    messages = TAKEN[name] if name in TAKEN else REFUSED[name][0]
    response = plain.post("/tokenize", json={"messages": messages})
    expected = outcome(ENTRANCES["request"], messages)
    if isinstance(expected, tuple):
        assert tuple(response.json()["tokens"]) == expected
    else:
        assert response.status_code == 400
        assert response.json()["error"]["message"].removesuffix(".") == expected
        assert response.json()["error"]["param"] == "messages"


TEXTS = st.sampled_from(["", "a", "Add 1 and 2.", "é\n"])
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "text", "refusal", "image_url"])},
        optional={"text": TEXTS, "refusal": TEXTS, "index": st.integers(0, 2), "txet": TEXTS},
    ),
    max_size=2,
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.just("add")},
    optional={"arguments": st.sampled_from(["", "{}", '{"a": 1}', "[]", {}, {"a": None}]), "parsed_arguments": TEXTS},
)
CALLS = st.fixed_dictionaries(
    {"function": FUNCTIONS},
    optional={"type": st.just("function"), "id": st.sampled_from(["c", "d", None]), "index": st.just(0)},
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "assistant", "tool", "tool", "function", "bot"])
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES},
    optional={
        "content": TEXTS | PARTS | st.none() | st.just(5),
        "name": st.sampled_from(["Ada", None, 5]),
        "tool_calls": st.lists(CALLS, max_size=2) | st.none(),
        "function_call": FUNCTIONS | st.none(),
        "tool_call_id": st.sampled_from(["c", "d", None]),
        "refusal": TEXTS | st.none(),
        "reasoning": TEXTS | st.just({"effort": "low"}),
        "reasoning_content": TEXTS,
        "parsed": st.none() | st.just({"a": 1}),
        "metadata": st.just({}),
        "mood": st.just("glad"),
    },
)
FAST = [name for name in ENTRANCES if "file" not in name or name == "row of a batch file"]


@given(st.lists(MESSAGES | st.just(USER) | st.just(CALLED) | st.just(RESULT), max_size=5))
def test_any_messages_have_one_outcome_at_all_entrances(messages: list[dict[str, Any]]) -> None:
    messages = json.loads(json.dumps([*messages, USER]))
    by_entrance = {name: outcome(ENTRANCES[name], messages) for name in FAST}
    assert len(set(by_entrance.values())) == 1, by_entrance

"""Arguments of `LLM` and `AsyncLLM`: every usual container of prompts is taken, and what is not is named."""

import asyncio
from collections import UserDict
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from mars_ray import LLM, AsyncLLM, MarsRayError, SamplingParams
from mars_ray.errors import AdapterError, RequestError
from mars_ray.llm.requests import as_conversation, as_conversations, as_tools, encode_prompts
from tests.samples import JUNK

ONE = SamplingParams(max_tokens=1)
TEXTS = ["Names: Ann,", "1, 2, 3"]
MESSAGE = {"role": "user", "content": "Names: Ann,"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class Series:
    """A Series as pandas has it, with an index that does not start at 0, so that items have no numbers."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __getitem__(self, label: object) -> Any:
        raise KeyError(label)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def tolist(self) -> list[Any]:
        return list(self._items)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("bundled", max_num_seqs=4) as opened:
        yield opened


def name_of(value: object) -> str:
    """Return a name without the address of an object, so that all processes of the tests agree on it."""
    return getattr(value, "__name__", type(value).__name__)


SEVERAL: list[Callable[[list[Any]], Any]] = [tuple, iter, Series, lambda items: (item for item in items)]


@pytest.mark.parametrize("several", [*SEVERAL, np.array, pa.array], ids=name_of)
def test_several_texts_may_come_in_any_container(llm: LLM, several: Callable[[list[str]], Any]) -> None:
    expected = [output.prompt_token_ids for output in llm.generate(TEXTS, ONE)]
    assert [output.prompt_token_ids for output in llm.generate(several(TEXTS), ONE)] == expected
    expected = [output.prompt_token_ids for output in llm.chat(TEXTS, ONE)]
    assert [output.prompt_token_ids for output in llm.chat(several(TEXTS), ONE)] == expected


@pytest.mark.parametrize("several", [*SEVERAL, np.array, torch.tensor, lambda ids: list(np.array(ids))], ids=name_of)
def test_ids_may_come_in_any_container(llm: LLM, several: Callable[[list[int]], Any]) -> None:
    [output] = llm.generate(several([5, 6, 7]), ONE)
    assert output.prompt_token_ids == (5, 6, 7)
    one, other = llm.generate([several([5, 6]), several([7])], ONE)
    assert (one.prompt_token_ids, other.prompt_token_ids) == ((5, 6), (7,))


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_rows_of_an_array_are_prompts(llm: LLM, array: Callable[[list[list[int]]], Any]) -> None:
    outputs = llm.generate(array([[5, 6], [7, 8]]), ONE)
    assert [output.prompt_token_ids for output in outputs] == [(5, 6), (7, 8)]


@pytest.mark.parametrize(
    "messages",
    [
        (MESSAGE,),
        [UserDict(MESSAGE)],
        [MappingProxyType(MESSAGE)],
        iter([MESSAGE]),
        [iter([MESSAGE])],
        [[MESSAGE]],
    ],
    ids=name_of,
)
def test_a_conversation_may_be_any_container_of_messages(llm: LLM, messages: Any) -> None:
    [expected] = llm.chat([MESSAGE], ONE)
    [output] = llm.chat(messages, ONE)
    assert output.prompt_token_ids == expected.prompt_token_ids


CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"days": [1, 2]}}}
ANSWERED = CALL | {"function": {"name": "weather", "arguments": "{}"}}
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Names: Ann,"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "18"},
]


def as_in_a_table(value: Any) -> Any:
    """Return a value as pandas reads it from parquet: lists are arrays, and numbers are of NumPy."""
    if isinstance(value, dict):
        return {name: as_in_a_table(item) for name, item in value.items()}
    if isinstance(value, list):
        items = np.empty(len(value), dtype=object)
        items[:] = [as_in_a_table(item) for item in value]
        return items
    return np.int64(value) if isinstance(value, int) else value


def as_objects(value: Any) -> Any:
    """Return a value with tuples and mappings that are no dictionaries."""
    if isinstance(value, dict):
        return MappingProxyType({name: as_objects(item) for name, item in value.items()})
    return tuple(map(as_objects, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("convert", [as_in_a_table, as_objects])
def test_the_parts_of_messages_and_tools_may_be_in_any_container(convert: Callable[[Any], Any]) -> None:
    assert as_conversation(convert(CALLS)) == as_conversation(CALLS)
    assert as_conversations(Series([convert(CALLS)] * 2)) == [as_conversation(CALLS)] * 2
    assert as_tools(convert([TOOL])) == [TOOL]


def test_conversations_may_be_a_column_of_an_arrow_table() -> None:
    column = pa.chunked_array([pa.array([[MESSAGE]]), pa.array([[MESSAGE, MESSAGE]])])
    assert as_conversations(column) == [as_conversation([MESSAGE]), as_conversation([MESSAGE, MESSAGE])]
    assert as_conversation(column[0]) == as_conversation([column[0][0]]) == as_conversation([MESSAGE])  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"^messages\[1\] must be a list"):
        as_conversations(pa.chunked_array([[[MESSAGE], None]]))


def test_calls_may_be_objects_of_the_client() -> None:
    calls = [ChatCompletionMessageFunctionToolCall.model_validate(ANSWERED)]
    talk = [CALLS[0], CALLS[1] | {"tool_calls": calls}, CALLS[2]]
    assert as_conversation(talk) == as_conversation([CALLS[0], CALLS[1] | {"tool_calls": [ANSWERED]}, CALLS[2]])


def test_a_message_that_holds_itself_is_refused() -> None:
    message: dict[str, Any] = dict(MESSAGE)
    message["metadata"] = [message]
    with pytest.raises(RequestError, match=r"^messages is nested too deeply"):
        as_conversation([message])


@pytest.mark.parametrize("empty", [[], (), iter([]), np.array([]), Series([])], ids=name_of)
def test_nothing_to_answer_in_any_container_gives_no_answers(llm: LLM, empty: Any) -> None:
    assert llm.generate(empty) == []
    assert llm.chat([]) == []


def test_sampling_parameters_may_come_in_any_container(llm: LLM) -> None:
    for several in SEVERAL:
        outputs = llm.generate(TEXTS, several([ONE, SamplingParams(max_tokens=2)]))
        assert [len(output.token_ids) for output in outputs] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompts": 5}, "prompts is 5"),
        ({"prompts": None}, "prompts is None"),
        ({"prompts": b"text"}, "prompts is b'text'"),
        ({"prompts": {"prompt": "a"}}, "prompts is {'prompt': 'a'}"),
        ({"prompts": ["a", None]}, r"prompts\[1\] is None"),
        ({"prompts": ["a", 1.5]}, r"prompts\[1\] is 1.5"),
        ({"prompts": [[5, "a"]]}, r"prompts\[0\] is \[5, 'a'\]"),
        ({"prompts": [5, "a"]}, r"prompts is \[5, 'a'\]"),
        ({"prompts": np.array([1.5])}, r"prompts\[0\] is 1.5"),
        ({"prompts": np.array(5)}, r"prompts is array\(5\)"),
        ({"prompts": "half \ud83d"}, r"prompts holds \\ud83d, which is only half of a surrogate pair"),
        ({"prompts": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params is {'max_tokens': 3}"),
        ({"prompts": "a", "sampling_params": [ONE, 5]}, "sampling_params is "),
        ({"prompts": "a", "threshold": "high"}, "threshold is 'high'"),
        ({"prompts": "a", "mode": 5}, "mode is 5"),
        ({"prompts": "a", "mode": ["ar"]}, r"mode is \['ar'\]"),
        ({"prompts": "a", "adapter": ["chat"]}, r"adapter is \['chat'\]"),
        ({"prompts": "a", "schema": 5}, "schema is 5"),
        ({"prompts": "a", "schema": {"type": object}}, "schema cannot be written as JSON"),
        ({"prompts": "a", "progress": "yes"}, "progress is 'yes'"),
    ],
)
def test_a_wrong_argument_of_generate_is_named(llm: LLM, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named}"):
        llm.generate(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"messages": 5}, "messages must be a list"),
        ({"messages": MESSAGE}, "messages must be a list"),
        ({"messages": [MESSAGE, 5]}, "messages.1 must be an object"),
        ({"messages": ["a", 5]}, r"messages\[1\] must be a list"),
        ({"messages": [[]]}, r"messages\[0\] must have at least 1 item"),
        ({"messages": "a", "tools": 5}, "tools is 5"),
        ({"messages": "a", "tools": "weather"}, "tools is 'weather'"),
        ({"messages": "a", "tools": [5]}, r"tools is \[5\]"),
        ({"messages": "a", "tools": [TOOL], "tool_choice": 5}, "tool_choice"),
    ],
)
def test_a_wrong_argument_of_chat_is_named(llm: LLM, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named}"):
        llm.chat(**arguments)


@pytest.mark.parametrize("adapters", [5, "folder", ["folder"], {"a": 5}, {"a": None}])
def test_wrong_adapters_are_named(llm: LLM, adapters: Any) -> None:
    with pytest.raises(AdapterError, match="adapter"):
        llm.set_adapters(adapters)


def test_one_tool_and_no_tools_are_lists() -> None:
    assert as_tools(TOOL) == as_tools(iter([TOOL])) == [TOOL]  # type: ignore[arg-type]
    assert as_tools(None) == as_tools(()) == []


@given(value=JUNK)
def test_any_value_is_taken_or_is_an_error_of_ours(llm: LLM, value: Any) -> None:
    for convert in (as_conversations, as_conversation, as_tools, lambda value: encode_prompts(llm.tokenizer, value)):
        try:
            convert(value)
        except MarsRayError as error:
            assert str(error)


def test_wrong_arguments_of_an_async_call_are_named() -> None:
    async def errors() -> list[str]:
        messages = []
        async with AsyncLLM("bundled", max_num_seqs=4) as llm:
            calls: list[Callable[[], Any]] = [
                lambda: llm.generate(["a", "b"]),  # type: ignore[list-item]
                lambda: llm.generate(5),  # type: ignore[arg-type]
                lambda: llm.chat(5),  # type: ignore[arg-type]
                lambda: llm.chat("a", {"max_tokens": 3}),  # type: ignore[arg-type]
                lambda: llm.chat("a", tools=5),  # type: ignore[arg-type]
                lambda: llm.stream(5).__anext__(),  # type: ignore[arg-type]
            ]
            for call in calls:
                with pytest.raises(RequestError) as caught:
                    await call()
                messages.append(str(caught.value).split()[0])
            assert len((await llm.generate(np.array([5, 6]), ONE)).token_ids) == 1
        return messages

    assert asyncio.run(errors()) == ["prompt", "prompt", "messages", "sampling_params", "tools", "messages"]

"""Fields that clients send back in conversations have no effect, and misspelt fields are refused."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from mars_ray.chat.client_fields import (
    ASSISTANT_FIELDS,
    CALL_FIELDS,
    DEFINITION_FIELDS,
    FUNCTION_FIELDS,
    MESSAGE_FIELDS,
    PART_FIELDS,
)
from mars_ray.chat.conversation import read_messages, read_tools
from mars_ray.errors import RequestError
from mars_ray.platform.anthropic.protocol import BLOCK_FIELDS, ConversationMessage, Tool
from mars_ray.platform.anthropic.protocol import MESSAGE_FIELDS as ANTHROPIC_MESSAGE_FIELDS
from mars_ray.platform.responses.protocol import ITEM_FIELDS, Item

VALUES: list[Any] = ["x", 5, True, {"a": 1}, [{"b": 2}], None]
USER: dict[str, Any] = {"role": "user", "content": "a"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "b"}
FUNCTION: dict[str, Any] = {"name": "f", "arguments": "{}"}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": FUNCTION}
PART: dict[str, Any] = {"type": "text", "text": "a"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "r"}


def of_message(extra: dict[str, Any]) -> Any:
    return read_messages([USER | extra])


def of_assistant(extra: dict[str, Any]) -> Any:
    return read_messages([USER, ASSISTANT | extra])


def of_part(extra: dict[str, Any]) -> Any:
    return read_messages([USER | {"content": [PART | extra, PART]}])


def of_refusal(extra: dict[str, Any]) -> Any:
    return read_messages([USER, ASSISTANT | {"content": [{"type": "refusal", "refusal": "no"} | extra]}])


def of_call(extra: dict[str, Any]) -> Any:
    return read_messages([USER, ASSISTANT | {"tool_calls": [CALL | extra]}, RESULT])


def of_function(extra: dict[str, Any]) -> Any:
    return read_messages([USER, ASSISTANT | {"tool_calls": [CALL | {"function": FUNCTION | extra}]}, RESULT])


def of_tool(extra: dict[str, Any]) -> Any:
    return read_tools([{"type": "function", "function": {"name": "f"}} | extra])


def of_definition(extra: dict[str, Any]) -> Any:
    return read_tools([{"type": "function", "function": {"name": "f"} | extra}])


def of_item(extra: dict[str, Any]) -> Any:
    return TypeAdapter(Item).validate_python({"type": "message", "role": "user", "content": "a"} | extra)


def of_call_item(extra: dict[str, Any]) -> Any:
    return TypeAdapter(Item).validate_python({"type": "function_call", "call_id": "c", **FUNCTION} | extra)


def of_item_part(extra: dict[str, Any]) -> Any:
    part = {"type": "output_text", "text": "a"} | extra
    return TypeAdapter(Item).validate_python({"type": "message", "role": "assistant", "content": [part]})


def of_block(extra: dict[str, Any]) -> Any:
    return ConversationMessage.model_validate({"role": "user", "content": [PART | extra]})


def of_tool_use(extra: dict[str, Any]) -> Any:
    block = {"type": "tool_use", "id": "c", "name": "f", "input": {}} | extra
    return ConversationMessage.model_validate({"role": "assistant", "content": [block]})


def of_anthropic_message(extra: dict[str, Any]) -> Any:
    return ConversationMessage.model_validate(USER | extra)


def of_anthropic_tool(extra: dict[str, Any]) -> Any:
    return Tool.model_validate({"name": "f", "input_schema": {}} | extra)


DEPTHS = [
    (of_message, MESSAGE_FIELDS),
    (of_assistant, ASSISTANT_FIELDS),
    (of_part, PART_FIELDS),
    (of_refusal, PART_FIELDS),
    (of_call, CALL_FIELDS),
    (of_function, FUNCTION_FIELDS),
    (of_tool, DEFINITION_FIELDS),
    (of_definition, DEFINITION_FIELDS),
    (of_item, ITEM_FIELDS),
    (of_call_item, ITEM_FIELDS),
    (of_item_part, ITEM_FIELDS),
    (of_block, BLOCK_FIELDS),
    (of_tool_use, BLOCK_FIELDS),
    (of_anthropic_message, ANTHROPIC_MESSAGE_FIELDS),
    (of_anthropic_tool, DEFINITION_FIELDS),
]


@pytest.mark.parametrize(("read", "fields"), DEPTHS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_field_that_clients_send_back_changes_nothing(read: Any, fields: frozenset[str]) -> None:
    plain = read({})
    for field in fields:
        for value in VALUES:
            assert read({field: value}) == plain, field
    assert read(dict.fromkeys(fields, 5)) == plain


@pytest.mark.parametrize("read", [read for read, _ in DEPTHS], ids=lambda read: read.__name__)
def test_any_other_field_is_refused_by_its_name(read: Any) -> None:
    with pytest.raises((RequestError, ValidationError), match="parsd"):
        read({"parsd": {"a": 1}})


def test_reasoning_under_the_name_of_vllm_and_openrouter_takes_effect() -> None:
    [_, message] = of_assistant({"reasoning": "hm"})
    assert message["reasoning_content"] == "hm"
    [_, message] = of_assistant({"reasoning": "hm", "reasoning_content": "so"})
    assert message["reasoning_content"] == "so"
    [_, message] = of_assistant({"reasoning": {"effort": "low"}})
    assert "reasoning_content" not in message


def test_the_summary_of_reasoning_changes_nothing() -> None:
    plain = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    summary = [{"type": "summary_text", "text": "It thinks."}]
    item = TypeAdapter(Item)
    assert item.validate_python(plain | {"summary": summary}) == item.validate_python(plain)


def test_a_tool_is_a_function_with_or_without_its_type() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    wrapped = read_tools([{"type": "function", "function": function}])
    spellings = (
        function,
        function | {"type": "function"},
        function | {"type": None, "function": None},
        {"function": function},
        {"type": None, "function": function},
    )
    for tool in spellings:
        assert read_tools([tool]) == wrapped
    with pytest.raises(RequestError, match=r"unknown parameter 'tools\.0\.parametres'"):
        read_tools([{"name": "f", "parametres": {}}])
    with pytest.raises(RequestError, match=r"tools\.0\.type must be 'function'"):
        read_tools([function | {"type": "web_search"}])

"""Training records in the forms that data sets have, and how their calls and results are learnt."""

import json
from typing import Any

import pytest

from mars_ray.data.chat import ChatEncoder, Encoded
from mars_ray.data.records import Message, Record, parse_record
from mars_ray.errors import BadRecordError
from tests.data.data_samples import CHATML, learnt_texts, make_tokenizer

USER: Message = {"role": "user", "content": "one"}
ASSISTANT: Message = {"role": "assistant", "content": "two"}
OBJECT = {"name": "add", "arguments": {"a": 1}}
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": OBJECT}]}
RESULT: Message = {"role": "tool", "name": "add", "content": "three"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or () %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_CALLS = "{# tools tool_calls #}" + CHATML


def parsed(**fields: Any) -> Record:
    return parse_record(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "one", "response": "two"},
        {"prompt": "one", "completion": "two"},
        {"prompt": "one", "response": None, "completion": "two"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "completion": "two"},
        {"messages": [USER, ASSISTANT]},
        {"messages": json.dumps([USER, ASSISTANT])},
        {"messages": [USER | {"content": [{"type": "text", "text": "one"}]}, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
        {"conversations": json.dumps([{"from": "user", "value": "one"}, {"from": "chatgpt", "value": "two"}])},
        {"conversations": [USER, ASSISTANT], "id": "x", "source": "y"},
        {"conversation": [USER, ASSISTANT]},
        {"conversation": [USER | {"language": "English", "toxic": False, "redacted": False}, ASSISTANT]},  # WildChat
        {"messages": [USER | {"weight": 0}, ASSISTANT | {"weight": 1}]},
        {"instruction": "one", "input": "", "output": "two"},
        {"instruction": "one", "output": "two"},
    ],
)
def test_a_question_and_its_answer_are_the_same_record_in_every_form(fields: dict[str, Any]) -> None:
    assert parsed(**fields) == Record((USER, ASSISTANT))


def test_a_system_column_comes_first_next_to_a_prompt_too() -> None:
    record = parsed(prompt="one", response="two", system="zero")
    assert [message["content"] for message in record.messages] == ["zero", "one", "two"]


@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_system_column_comes_first_in_every_form_unless_the_messages_begin_with_it(column: str) -> None:
    system: Message = {"role": "system", "content": "zero"}
    for form in ({"messages": [USER, ASSISTANT]}, {"conversations": [system, USER, ASSISTANT]}):
        assert parsed(**form, **{column: "zero"}) == Record((system, USER, ASSISTANT))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"instruction": "one", "output": "two", "history": [["a", "b"]]}, "history"),
        ({"messages": [USER, ASSISTANT], "tools": [TOOL], "functions": [OBJECT | {"arguments": None}]}, "functions"),
    ],
)
def test_a_column_that_would_be_left_out_refuses_the_record(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecordError, match=reason):
        parsed(**fields)


def test_an_answer_that_must_not_be_learnt_is_refused() -> None:
    with pytest.raises(BadRecordError, match="weight 0"):
        parsed(messages=[USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT])


def test_alpacas_input_follows_its_instruction_and_a_system_column_comes_first() -> None:
    record = parsed(instruction="one", input="two", output="three", system="four")
    assert [message["content"] for message in record.messages] == ["four", "one\n\ntwo", "three"]


def test_calls_and_tools_of_share_gpt_are_those_of_messages() -> None:
    turns = [
        {"from": "human", "value": "one"},
        {"from": "function_call", "value": json.dumps(OBJECT)},
        {"from": "observation", "value": "three"},
        {"from": "gpt", "value": "two"},
    ]
    record = parsed(conversations=turns, tools=json.dumps([TOOL]))
    written = parsed(messages=[USER, CALLED, {"role": "tool", "content": "three"}, ASSISTANT], tools=[TOOL])
    assert record == written
    assert record.tools == (TOOL,)
    assert record == parsed(conversations=turns, functions=[TOOL["function"]])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "one"}, "it has no 'response' or 'completion' to its 'prompt'"),
        ({"prompt": "one", "response": ""}, "it has no response: there is nothing to learn from it"),
        ({"prompt": "one", "completion": []}, "it has no response: there is nothing to learn from it"),
        ({"messages": [USER, ASSISTANT | {"content": " "}]}, "it has no response: there is nothing to learn from it"),
        ({"conversations": [{"from": "moderator", "value": "a"}]}, "conversations.0 is from 'moderator'"),
        ({"conversations": [{"from": "gpt"}]}, "it has no response"),
        ({"conversations": [{"from": "human"}]}, "conversations.0.content is missing"),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, "conversations.0 is a function_call, whose"),
        ({"conversations": "one"}, "conversations must be a list"),
        ({"messages": [USER, ASSISTANT], "tools": "add"}, "tools must be a list"),
        ({"messages": [USER, ASSISTANT], "tools": [TOOL, TOOL]}, "tools holds 2 functions with the name 'add'"),
        ({"messages": [USER, CALLED, USER, ASSISTANT]}, "the call 'call_1_0' has no result"),
    ],
)
def test_a_record_that_cannot_be_learnt_says_why(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        parsed(**fields)
    assert str(caught.value).startswith(reason)
    assert not str(caught.value).endswith(".")


def learnt(record: Record, template: str) -> list[str] | str:
    """The text of each run of response tokens, or the reason why the record is refused."""
    tokenizer = make_tokenizer(template)
    [outcome] = ChatEncoder(tokenizer).encode([record])
    return learnt_texts(tokenizer, outcome) if isinstance(outcome, Encoded) else str(outcome)


def test_only_the_turns_of_the_assistant_and_its_calls_are_learnt() -> None:
    record = parsed(messages=[USER, CALLED, RESULT, ASSISTANT], tools=[TOOL])
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    assert learnt(record, WITH_TOOLS) == [call, "two<|im_end|>"]
    tokens = ChatEncoder(make_tokenizer(WITH_TOOLS)).encode([record])[0]
    assert isinstance(tokens, Encoded)
    assert '"parameters"' in make_tokenizer(WITH_TOOLS).decode(tokens.tokens.tolist())


def test_a_record_that_ends_with_a_call_teaches_the_call() -> None:
    learnt_call = learnt(parsed(messages=[USER, CALLED]), WITH_TOOLS)
    assert len(learnt_call) == 1 and '"name": "add"' in learnt_call[0]


def test_calls_that_a_template_does_not_show_are_refused_with_the_reason() -> None:
    for record in (parsed(messages=[USER, CALLED]), parsed(messages=[USER, ASSISTANT], tools=[TOOL])):
        reason = learnt(record, CHATML)
        assert isinstance(reason, str) and reason.startswith("the chat template of this model knows no tools")
    assert (
        learnt(parsed(messages=[USER, CALLED]), WITHOUT_CALLS) == "the chat template leaves out the calls of message 1"
    )

"""The meaning of prompts and answers of the family `tool_call`, whose prompts an endpoint renders to the same text."""

import json
import random
import re
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from benchmarks.tool_calls import HERMES, request_body
from mars_ray.chat.call_format import answer_format
from mars_ray.chat.conversation import plain_messages
from mars_ray.chat.generic_tools import written_calls
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.tasks import FAMILIES, TaskExample
from mars_ray.data.tasks.families.tool_call import NO_TOOL
from mars_ray.data.tasks.functions import FUNCTIONS, CatalogFunction
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES, GOODS, JOBS, THINGS
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import resolve_model
from mars_ray.openai_api.protocol import ChatCompletionRequest
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.openai_api.tools import conversation, tools_of
from pipelines.build_bundled_model import CHAT_TEMPLATE, record
from pipelines.made_up_words import spliced, with_made_up_words

TYPES = {"string": str, "integer": int, "boolean": bool}
CALL: dict[str, Any] = {"name": "buy", "arguments": {"goods": "rice", "count": 3, "fast": True}}


@cache
def made() -> list[TaskExample]:
    rng = random.Random(7)
    return [FAMILIES["tool_call"].make(rng) for _ in range(600)]


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    tokenizer: PreTrainedTokenizerBase = check_folder(resolve_model("bundled")).load_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return ChatEncoder(tokenizer)


def call_in(text: str) -> dict[str, Any] | None:
    """The call that a text consists of."""
    if not text.startswith("<tool_call>"):
        return None
    call: dict[str, Any] = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return call


def verified(*calls: dict[str, Any], around: str = "{}") -> bool:
    text = written_calls(HERMES, ((call["name"], call["arguments"]) for call in calls))
    return FAMILIES["tool_call"].verify(json.dumps(CALL), around.format(text))


def test_a_call_names_an_offered_tool_and_keeps_to_its_schema() -> None:
    calls = [(example, call) for example in made() if (call := call_in(example.response))]
    assert len(calls) > 300
    for example, call in calls:
        [parameters] = [tool["parameters"] for tool in example.tools if tool["name"] == call["name"]]
        assert set(parameters["required"]) <= set(call["arguments"])
        for name, value in call["arguments"].items():
            schema = parameters["properties"][name]
            assert type(value) is TYPES[schema["type"]]
            assert value in schema.get("enum", [value])
            assert isinstance(value, bool) or str(value) in example.prompt


def wanted(prompt: str) -> CatalogFunction | None:
    """The function that a prompt requests."""
    patterns = ((function, re.sub("{[a-z]+}", ".+", text)) for function in FUNCTIONS for text in function.requests)
    return next((function for function, pattern in patterns if re.search(pattern.replace("?", "[?]"), prompt)), None)


def test_the_requested_function_is_called_if_it_is_offered() -> None:
    for example in made():
        offered = {tool["name"]: tool["description"] for tool in example.tools}
        function = wanted(example.prompt)
        call = call_in(example.after[0]["content"] if example.after else example.response)
        if call:
            assert function and offered[call["name"]] == function.description
        elif function:
            assert example.response == NO_TOOL
            assert function.description not in offered.values()


def test_other_tasks_are_answered_although_tools_are_offered() -> None:
    others = [example for example in made() if wanted(example.prompt) is None]
    assert len(others) > 30
    assert not any(call_in(example.response) or example.response == NO_TOOL for example in others)


def test_a_result_is_stated_after_its_call() -> None:
    stated = [example for example in made() if example.after]
    assert len(stated) > 50
    for example in stated:
        call, result = example.after
        assert call_in(call["content"]) is not None
        assert (call["role"], result["role"]) == ("assistant", "user")
        content = result["content"].removeprefix("<tool_response>").removesuffix("</tool_response>")
        [value] = json.loads(content).values()
        assert str(value) in example.response


def test_one_to_four_tools_are_offered_under_different_names() -> None:
    counts = [len({tool["name"] for tool in example.tools}) for example in made()]
    assert counts == [len(example.tools) for example in made()]
    assert set(counts) == {1, 2, 3, 4}


def test_the_order_of_arguments_and_space_around_a_call_do_not_matter() -> None:
    turned = CALL | {"arguments": dict(reversed(CALL["arguments"].items()))}
    assert verified(CALL) and verified(turned) and verified(CALL, around="\n{} ")


@pytest.mark.parametrize(
    "arguments",
    [
        {"goods": "rice", "count": 3},
        {"goods": "rice", "count": "3", "fast": True},
        {"goods": "rice", "count": 3, "fast": 1},
        {"goods": "rice", "count": 3, "fast": True, "unit": "box"},
    ],
)
def test_other_arguments_are_wrong(arguments: dict[str, Any]) -> None:
    assert not verified(CALL | {"arguments": arguments})


def test_another_name_a_second_call_and_text_around_are_wrong() -> None:
    assert not verified(CALL | {"name": "order"})
    assert not verified(CALL, CALL)
    assert not verified(CALL, around="Of course. {}")
    assert not FAMILIES["tool_call"].verify(json.dumps(CALL), json.dumps(CALL))
    assert not FAMILIES["tool_call"].verify(json.dumps(CALL), f"{'x' * 12}{json.dumps(CALL)}{'x' * 13}")


def test_an_endpoint_renders_a_request_with_tools_to_the_text_that_is_trained(encoder: ChatEncoder) -> None:
    model = answer_format(CHAT_TEMPLATE, {})
    assert model.calls == HERMES and model.template_takes_tools
    for example in made():
        request = ChatCompletionRequest.model_validate(request_body(example, "bundled"))
        served = conversation(plain_messages(request.messages), tools_of(request, RequestLimits()), model)
        assert encoder.prompt_text(served.messages, served.tools) == encoder.prompt_text(example.messages)


def test_a_conversation_without_tools_renders_as_plain_turns(encoder: ChatEncoder) -> None:
    turns = [{"role": "developer", "content": "s"}, {"role": "user", "content": "u"}]
    answered = [*turns, {"role": "assistant", "content": "a"}]
    assert encoder.prompt_text(turns) == "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    assert encoder.whole_text(answered) == "<|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|>"


def test_tools_follow_the_system_message_and_any_schema_has_a_line(encoder: ChatEncoder) -> None:
    odd = {"type": "object", "properties": {"a": {}, "b": {"enum": [1, 2]}, "c": {"type": "array"}}, "required": ["c"]}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": odd}},
        {"type": "function", "function": {"name": "g", "description": "Now."}},
    ]
    text = encoder.prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "u"}], tools)
    lines = "Tools:\nf(a?: any, b?: 1|2, c: array): \ng(): Now."
    assert text == f"<|system|>Be brief.\n\n{lines}<|end|><|user|>u<|end|><|assistant|>"


def test_made_up_words_are_the_same_in_all_messages_of_an_example() -> None:
    known = {*FIRST_NAMES, *CITIES, *GOODS, *JOBS, *THINGS}
    stated = [example for example in made() if example.after]
    for example in stated:
        renamed = with_made_up_words(example, random.Random(3), spliced)
        call = call_in(renamed.after[0]["content"])
        assert call is not None
        words = {word for value in call["arguments"].values() if isinstance(value, str) for word in value.split()}
        assert all(word in renamed.prompt for word in words)
        assert not words & (known - set(renamed.prompt.split()))
        assert renamed.tools == example.tools and renamed.before == example.before


def test_a_training_record_holds_the_whole_conversation() -> None:
    example = next(example for example in made() if example.after)
    roles = [message["role"] for message in record(example)["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]

"""litellm with its providers `openai` and `anthropic`."""

import asyncio
import json
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("litellm") is None:
    pytest.skip("litellm is missing: run make test-clients", allow_module_level=True)

import litellm

from tests.clients.dialogues import (
    BOTH,
    CALLS,
    CALLS_AT_ONCE,
    LONG_STOP,
    LONG_STOP_REFUSAL,
    PERSON,
    PERSON_ANSWER,
    QUESTION,
    REFUSAL,
    REPORT,
    TOO_FEW,
    Calls,
)

PROVIDERS = pytest.mark.parametrize("provider", ["openai", "anthropic"])
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}


def function(name: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Tell the {name}.", "parameters": parameters},
    }


TOOLS = [function("weather", "city"), function("clock", "zone")]


def asked(provider: str, url: str, name: str, content: str) -> dict[str, Any]:
    base = f"{url}/v1" if provider == "openai" else url
    messages = [{"role": "user", "content": content}]
    return {"model": f"{provider}/{name}", "api_base": base, "api_key": "none", "messages": messages, "num_retries": 0}


@PROVIDERS
def test_an_answer_comes_whole_and_as_a_stream(bundled: str, provider: str) -> None:
    fields = asked(provider, bundled, "bundled", PERSON)
    answer = litellm.completion(**fields)
    assert answer.choices[0].message.content == PERSON_ANSWER
    assert answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(**fields, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == PERSON_ANSWER
    assert len(list(filter(None, pieces))) > 1


@PROVIDERS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("question", "calls"), [(QUESTION, CALLS), (BOTH, CALLS_AT_ONCE)])
def test_two_tools_are_called_and_their_results_reported(
    scripted: str, provider: str, stream: bool, question: str, calls: list[tuple[str, str]]
) -> None:
    record = Calls()
    fields = asked(provider, scripted, "scripted", question)
    while True:
        answer = litellm.completion(**fields, tools=TOOLS, stream=stream)
        message = (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message
        if not message.tool_calls:
            break
        fields["messages"].append(message.model_dump())
        for call in message.tool_calls:
            result = getattr(record, call.function.name)(**json.loads(call.function.arguments))
            fields["messages"].append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == REPORT
    assert record.seen == calls


@PROVIDERS
def test_an_answer_conforms_to_a_schema(bundled: str, provider: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(**asked(provider, bundled, "bundled", "Weather?"), response_format=schema)
    assert json.loads(answer.choices[0].message.content).keys() == {"unit", "days"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_responses_are_answered(bundled: str, stream: bool) -> None:
    fields = {"model": "openai/bundled", "api_base": f"{bundled}/v1", "api_key": "none", "input": PERSON}
    if stream:
        events = list(litellm.responses(**fields, stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    else:
        text = litellm.responses(**fields).output[-1].content[0].text
    assert text == PERSON_ANSWER


def test_the_form_of_messages_is_answered_by_the_provider_anthropic(bundled: str) -> None:
    fields = asked("anthropic", bundled, "bundled", PERSON)
    del fields["num_retries"]
    answer = asyncio.run(litellm.anthropic.messages.acreate(**fields, max_tokens=100))
    assert answer["content"][0]["text"] == PERSON_ANSWER


@pytest.mark.parametrize(
    ("provider", "settings", "said"),
    [
        ("openai", {"max_tokens": TOO_FEW}, REFUSAL),
        ("anthropic", {"stop": [LONG_STOP]}, LONG_STOP_REFUSAL),
    ],
)
def test_a_refusal_is_an_error_of_the_client(bundled: str, provider: str, settings: Any, said: str) -> None:
    with pytest.raises(litellm.BadRequestError, match=said):
        litellm.completion(**asked(provider, bundled, "bundled", PERSON), **settings)

"""OpenAI's Responses API: its client works unmodified, and what cannot be served is refused by name."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.serve.endpoint_clients import MODEL, check_error, http, settled
from tests.serve.endpoint_samples import ANSWER, MESSAGES, Served, config_of, served
from tests.serve.request_samples import RESPONSES
from tests.serve.tool_samples import WEATHER

ASKED = MESSAGES[0]["content"]
PARAMETERS = WEATHER["function"]["parameters"]
TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}
PLAIN: dict[str, Any] = {"model": MODEL, "input": ASKED, "max_output_tokens": 60}
CALL: dict[str, Any] = PLAIN | {
    "input": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "max_output_tokens": 200,
}


@pytest.fixture(scope="module")
def generic() -> Iterator[Served]:
    """The bundled model knows no tools, so that a system message describes them."""
    with served(config_of(tool_call_parser="hermes")) as running:
        yield running


@pytest.fixture(scope="module")
def client(generic: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{generic.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def without_ids(output: list[Any]) -> list[dict[str, Any]]:
    unlike = {"id", "call_id", "parsed", "parsed_arguments"}
    items = [item.model_dump(exclude=unlike) for item in output]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return items


def test_an_answer_is_that_of_chat_completions(client: OpenAI) -> None:
    response = client.responses.create(**PLAIN | {"metadata": {"a": "b"}})
    assert response.output_text == ANSWER
    assert (response.status, response.metadata) == ("completed", {"a": "b"})
    usage = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=60).usage  # type: ignore[arg-type]
    assert response.usage and usage
    assert (response.usage.input_tokens, response.usage.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)


def test_the_verbosity_that_some_clients_send_changes_nothing(client: OpenAI) -> None:
    assert client.responses.create(**PLAIN, text={"verbosity": "low"}).output_text == ANSWER


@pytest.mark.parametrize("fields", [PLAIN, CALL, PLAIN | {"max_output_tokens": 3}])
def test_a_stream_says_what_the_response_says(client: OpenAI, fields: dict[str, Any]) -> None:
    response = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last = events[-1].response  # type: ignore[union-attr]
    assert (last.status, last.incomplete_details) == (response.status, response.incomplete_details)
    assert without_ids(last.output) == without_ids(response.output)
    assert [event.type for event in events[:3]] == [
        "response.created", "response.in_progress", "response.output_item.added"
    ]  # fmt: skip
    assert [event.type for event in events[-2:]] == ["response.output_item.done", f"response.{response.status}"]


def test_a_function_is_called_and_the_conversation_goes_on_after_its_output(client: OpenAI) -> None:
    response = client.responses.create(**CALL)
    [call] = response.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "18"}
    again = client.responses.create(**CALL | {"input": [*CALL["input"], *response.output, output]})
    assert [item.type for item in again.output] == ["function_call"]
    assert again.usage and response.usage
    assert again.usage.input_tokens > response.usage.input_tokens


def test_an_answer_is_parsed_as_its_type(client: OpenAI) -> None:
    class Unit(BaseModel):
        unit: Literal["C", "F"]

    parsed = client.responses.parse(model=MODEL, input=ASKED, text_format=Unit, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Unit)


OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "18"}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items in input"),
        ({"background": True}, "background", "background is not supported by this server"),
        ({"conversation": "conv_1"}, "conversation", "conversation is not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "reasoning is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "a tool of type 'web_search' is not supported"),
        ({"tools": [TOOL] * 500}, "tools", "500 functions"),
        ({"input": [OUTPUT]}, "messages", "the result of a call 'a'"),
        ({"input": [IMAGE]}, "input", "'input_image' is not supported"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "'item_reference'; use one of 'message'"),
        ({"input": []}, "input", "input is empty; give a text"),
        ({"max_output_tokens": 10**6}, "max_completion_tokens", "this server takes at most"),
        ({"messages": []}, "messages", "unknown parameter 'messages'"),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_to_change(
    generic: Served, fields: dict[str, Any], param: str, said: str
) -> None:
    with http(generic) as plain:
        refused = plain.post(RESPONSES, json=PLAIN | fields)
    assert said in check_error(refused, 400, param=param, code=refused.json()["error"]["code"])
    settled(generic)

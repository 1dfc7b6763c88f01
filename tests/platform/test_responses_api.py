"""OpenAI's Responses API: its client works unmodified, and what cannot be served is refused by name."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

import jsonschema
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types import shared_params
from openai.types.responses import ResponseErrorEvent, response_create_params
from pydantic import BaseModel
from starlette.requests import Request

from mars_ray.engine.chunk import Chunk
from mars_ray.errors import GrammarError
from mars_ray.openai_api.responses import ChatResponseBuilder, ResponseMetadata
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.platform.responses.events import ResponseObjectBuilder
from mars_ray.platform.responses.protocol import (
    RESPONSES_IGNORED,
    RESPONSES_NEUTRAL,
    ReasoningOptions,
    ResponsesRequest,
)
from mars_ray.platform.responses.routes import response_form
from mars_ray.platform.responses.translate import chat_request_of
from mars_ray.serve.http.extension import Meter
from mars_ray.serve.http.generation import Generation, answer_events
from mars_ray.serve.http.streams import MergedCalls
from mars_ray.serve.middleware.exchange import Exchange
from tests.serve.endpoint_clients import MODEL, check_error, http, settled
from tests.serve.endpoint_samples import ANSWER, MESSAGES, Keyed
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


@pytest.fixture
def client(keyed: Keyed) -> OpenAI:
    return keyed.ada


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


def test_a_request_may_set_its_threshold(client: OpenAI) -> None:
    answer = client.responses.with_raw_response.create(**PLAIN, extra_body={"threshold": 0.6})
    assert answer.headers["x-mars-threshold"] == "0.6"
    with pytest.raises(BadRequestError, match="threshold or threshold_floor, not both"):
        client.responses.create(**PLAIN, extra_body={"threshold": 0.6, "threshold_floor": 0.5})


def test_the_fields_of_ours_mean_what_they_mean_in_a_chat_request() -> None:
    ours = {"threshold_floor": 0.5, "mode": "exact", "block": 3}
    request = chat_request_of(ResponsesRequest.model_validate(PLAIN | ours))
    assert {name: getattr(request, name) for name in ours} == ours


def test_instructions_and_what_the_developer_says_first_are_one_message_of_the_system() -> None:
    talk = [{"role": role, "content": role} for role in ("developer", "system", "user", "developer")]
    messages = chat_request_of(ResponsesRequest.model_validate(PLAIN | {"instructions": "x", "input": talk})).messages
    assert [(message.role, message.content) for message in messages] == [
        ("system", "x\n\ndeveloper\n\nsystem"),
        ("user", "user"),
        ("developer", "developer"),
    ]


def test_a_developer_who_says_nothing_is_a_message_of_the_system() -> None:
    body = PLAIN | {"input": [{"role": "developer", "content": ""}]}
    messages = chat_request_of(ResponsesRequest.model_validate(body)).messages
    assert [(message.role, message.content) for message in messages] == [("system", "")]


def test_of_allowed_tools_only_those_are_called(client: OpenAI) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    response = client.responses.create(**CALL | {"tools": [TOOL | {"name": "other"}, TOOL], "tool_choice": choice})
    assert {item.name for item in response.output if item.type == "function_call"} == {"get_weather"}
    assert response.tool_choice.model_dump() == choice  # type: ignore[union-attr]


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


def test_every_field_the_openai_package_can_send_was_thought_about() -> None:
    known = set(ResponsesRequest.model_fields) | RESPONSES_IGNORED | RESPONSES_NEUTRAL.keys()
    offered = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert offered <= known, "a new version of openai: act upon these fields, ignore them or refuse them"
    assert shared_params.Reasoning.__annotations__.keys() <= ReasoningOptions.model_fields.keys()


def test_a_strict_format_reaches_the_grammar_and_comes_back_as_it_was_sent(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    response = client.responses.create(**PLAIN | {"text": {"format": form}})
    assert response.output_text == '{"a": {}}'
    assert response.text and response.text.format and response.text.format.to_dict() == form


@pytest.mark.parametrize(
    "fields",
    [
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"include": [], "reasoning": {"effort": None, "summary": "auto"}},
        {"include": None, "reasoning": {"effort": "low", "context": "all_turns"}, "store": None},
    ],
    ids=["codex", "agents", "nulls"],
)
def test_what_coding_agents_send_by_default_is_accepted(client: OpenAI, fields: dict[str, Any]) -> None:
    response = client.responses.create(**PLAIN | {"max_output_tokens": 1} | fields)
    assert response.store == (fields.get("store") is not False)  # type: ignore[attr-defined]


OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "18"}
USED = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"}
SCHEMA = {"type": "json_schema", "name": "a"}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}


@pytest.mark.parametrize(
    ("item", "same"),
    [
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"content": []}, {"content": ""}),
        ({"type": None, "content": "No."}, {"type": "message", "content": "No."}),
    ],
)
def test_an_answer_may_be_sent_back_in_each_of_its_forms(item: dict[str, Any], same: dict[str, Any]) -> None:
    read, expected = (
        ResponsesRequest.model_validate({"input": [{"role": "assistant"} | fields]}) for fields in (item, same)
    )
    assert chat_request_of(read) == chat_request_of(expected)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "Response with id 'resp_1' not found"),
        ({"previous_response_id": ""}, "previous_response_id", "Response with id '' not found"),
        ({"background": True}, "background", "background is not supported by this server"),
        ({"conversation": "conv_1"}, "conversation", "conversation is not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include", "'message.output_text.logprobs' is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "a tool of type 'web_search' is not supported"),
        ({"tools": [TOOL] * 500}, "tools", "500 functions"),
        ({"input": [OUTPUT]}, "input", "the result of a call 'a'"),
        ({"input": [OUTPUT]}, "input", "correct call_id"),
        ({"input": [USED]}, "input", "add an item of type function_call_output with its call_id"),
        ({"input": [{"role": "user", "content": "x"}] * 1025}, "input", "the number of messages is 1025"),
        ({"input": [{"role": "user", "content": "x"}] * 4096, "instructions": "x"}, "input", "messages is 4097"),
        ({"text": {"format": SCHEMA | {"schema": {"type": "x"}}}}, "text.format", "x"),
        ({"input": [IMAGE]}, "input", "'input_image' is not supported"),
        ({"input": []}, "input", "input is empty; give a text"),
        ({"input": [{"role": "user", "content": []}]}, "input", "input.0.content is empty"),
        ({"input": [{"type": None, "content": "x"}]}, "input", "input.0 needs 'type'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be greater than or equal to 1"),
        ({"reasoning": {"effort": "very"}}, "reasoning", "reasoning.effort must be 'none', 'minimal'"),
        ({"reasoning": {"summary": 5}}, "reasoning", "reasoning.summary must be 'auto'"),
        ({"reasoning": "high"}, "reasoning", "reasoning must be an object"),
        ({"messages": []}, "messages", "unknown parameter 'messages'"),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_to_change(
    keyed: Keyed, fields: dict[str, Any], param: str, said: str
) -> None:
    with http(keyed.served, keyed.keys[0]) as plain:
        refused = plain.post(RESPONSES, json=PLAIN | fields)
    assert said in check_error(refused, 400, param=param, code=refused.json()["error"]["code"])
    settled(keyed.served)


def test_earlier_items_may_be_given_by_their_ids(client: OpenAI) -> None:
    """The AI SDK sends earlier answers so."""
    first = client.responses.create(**PLAIN)
    again = {"role": "user", "content": "And now?"}
    whole = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}, again]
    referring = [whole[0], {"type": "item_reference", "id": first.output[0].id}, again]
    answers = [client.responses.create(**PLAIN | {"input": given}) for given in (whole, referring, [*referring])]
    assert len({(answer.output_text, answer.usage and answer.usage.input_tokens) for answer in answers}) == 1
    items = client.responses.input_items.list(answers[1].id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3
    for unknown in ("mes_1", f"mes_resp_{'0' * 32}_0"):
        with pytest.raises(NotFoundError, match=f"Item with id '{unknown}' not found"):
            client.responses.create(**PLAIN | {"input": [{"id": unknown}]})


def test_a_call_that_was_cut_off_and_text_after_a_call_may_be_sent_back(client: OpenAI) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": '{"city": "Par'}
    text = {"role": "assistant", "content": "<tool_call>"}
    output = {"type": "function_call_output", "call_id": "a", "output": "5"}
    given = [{"role": "user", "content": ASKED}, call, text, output]
    assert client.responses.create(**PLAIN | {"input": given, "tools": [TOOL]}).status == "completed"


def test_an_error_in_a_stream_names_the_field_of_the_response() -> None:
    body = ResponsesRequest(model=MODEL, input=ASKED)
    metadata = ResponseMetadata(id="resp_1", created=0, model=MODEL, token_bytes=[b"a"] * 10)
    exchange = Exchange(request_id="1", method="POST", path=RESPONSES, api=response_form(RESPONSES), arrived_unix_s=0.0)
    builder = ResponseObjectBuilder(ChatResponseBuilder(metadata), metadata, body)
    usage = ResponseUsage(prompt_tokens=1)
    http = Request(exchange.put_in({"type": "http"}))
    generation = Generation(chat_request_of(body), [], http, builder, usage, "", None, [], Meter(), 1)

    async def fail(_take: object) -> None:
        raise GrammarError("the grammar cannot be followed any further.")

    async def last_event() -> Any:
        arriving = MergedCalls[Sequence[Chunk]]([fail])
        events = [event async for event in answer_events(generation, (0, [Chunk("1", 0, (5,), ("a",))]), arriving)]
        return events[-1]

    last = asyncio.run(last_event())
    fields = json.loads(last.data)
    assert fields["error"]["param"] == "text.format"
    assert last.name == "error"
    assert ResponseErrorEvent.model_validate(fields, strict=True).param == "text.format"

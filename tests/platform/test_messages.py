"""Anthropic's Messages API: its client works unmodified, and what cannot be served is refused in its own form."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import jsonschema
import pytest
from anthropic import Anthropic

from mars_ray.platform.anthropic.protocol import MessagesRequest
from mars_ray.platform.anthropic.translate import chat_request
from tests.serve.endpoint_clients import MODEL, http, settled
from tests.serve.endpoint_samples import ANSWER, MESSAGES, Served, config_of, served
from tests.serve.key_samples import add_key
from tests.serve.request_samples import MESSAGES_PATH
from tests.serve.tool_samples import QUESTION, WEATHER

PARAMETERS = WEATHER["function"]["parameters"]
TOOL = {"name": "get_weather", "description": "Weather of a city.", "input_schema": PARAMETERS}
CALL: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "get_weather"},
    "max_tokens": 200,
}
ENDLESS = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2000}}, "required": ["a"]}
OUTPUT_TOKENS = 220
"""The server's limit on the tokens of an answer."""
PLAIN: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60}


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """An endpoint whose model is offered tools, and a key for it."""
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    key = add_key(keys, "ada", "use")
    with served(
        config_of(tool_call_parser="hermes", keys=str(keys), limits={"output_tokens": OUTPUT_TOKENS})
    ) as running:
        yield running, key


@pytest.fixture(scope="module")
def client(messages: tuple[Served, str]) -> Iterator[Anthropic]:
    running, key = messages
    with Anthropic(base_url=running.url, api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def plain(messages: tuple[Served, str]) -> Iterator[httpx2.Client]:
    with http(*messages) as client:
        yield client


def test_an_answer_is_that_of_chat_completions(client: Anthropic, plain: httpx2.Client) -> None:
    message = client.messages.create(**PLAIN)
    [block] = message.content
    assert (block.type, block.text) == ("text", ANSWER)  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = plain.post("/v1/chat/completions", json=PLAIN).json()["usage"]
    prompt_tokens = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert (prompt_tokens, message.usage.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "adaptive", "display": "summarized"}},
        {"diagnostics": {"request": None}},
        {"speed": "standard"},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"tools": [TOOL | {"name": "mcp__" + "a" * 100}], "tool_choice": {"type": "none"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_agents_send_without_asking_for_anything_changes_nothing(
    plain: httpx2.Client, fields: dict[str, Any]
) -> None:
    answered = plain.post(MESSAGES_PATH, json=PLAIN | fields)
    assert answered.status_code == 200, answered.text


def test_messages_of_the_system_may_stand_among_the_others() -> None:
    talk = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a"},
        {"role": "system", "content": [{"type": "text", "text": "It is late."}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    body = MessagesRequest.model_validate(PLAIN | {"system": "Be short.", "messages": talk})
    found = [(message.role, message.content) for message in chat_request(body, reasons=False).messages]
    assert found == [
        ("system", "Be short.\n\nBe kind."),
        ("user", "a\n\nIt is late."),
        ("assistant", "b"),
        ("user", "c"),
    ]


def test_turns_of_one_role_that_follow_each_other_are_one_turn() -> None:
    calls = [{"type": "tool_use", "id": id, "name": "get_weather", "input": {}} for id in "ab"]
    results = [{"type": "tool_result", "tool_use_id": id, "content": id} for id in "ab"]
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, calls[0]]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, calls[1]]},
        {"role": "user", "content": results},
    ]
    body = MessagesRequest.model_validate(PLAIN | {"messages": talk})
    user, answer, *outputs = chat_request(body, reasons=False).messages
    assert (user.role, answer.role, [output.role for output in outputs]) == ("user", "assistant", ["tool", "tool"])
    assert answer.content == "b\n\nc"
    assert [call.id for call in answer.tool_calls] == ["a", "b"]  # type: ignore[union-attr]


def test_the_limit_on_messages_counts_those_of_the_caller(plain: httpx2.Client) -> None:
    talk = [{"role": "user", "content": "a"}] * 1025
    for path in (MESSAGES_PATH, f"{MESSAGES_PATH}/count_tokens"):
        body = {name: value for name, value in PLAIN.items() if path == MESSAGES_PATH or name != "max_tokens"}
        refused = plain.post(path, json=body | {"messages": talk})
        assert refused.status_code == 400 and "the number of messages is 1025" in refused.text


def test_a_request_may_set_its_threshold(client: Anthropic) -> None:
    answer = client.messages.with_raw_response.create(**PLAIN, extra_body={"threshold": 0.6})
    assert answer.headers["x-mars-threshold"] == "0.6"
    with pytest.raises(anthropic.BadRequestError, match="threshold or threshold_floor, not both"):
        client.messages.create(**PLAIN, extra_body={"threshold": 0.6, "threshold_floor": 0.5})


@pytest.mark.parametrize(
    ("fields", "stop_reason", "stop_sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["nothing", '"age"']}, "stop_sequence", '"age"'),
        (CALL, "tool_use", None),
        (CALL | {"stop_sequences": ['"city"']}, "stop_sequence", '"city"'),
        ({"system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]}, None, None),
    ],
)
def test_a_stream_says_what_the_message_says(
    client: Anthropic, fields: dict[str, Any], stop_reason: str | None, stop_sequence: str | None
) -> None:
    message = client.messages.create(**PLAIN | fields)
    assert stop_reason in (None, message.stop_reason)
    assert message.stop_sequence == stop_sequence
    with client.messages.stream(**PLAIN | fields) as stream:
        last = stream.get_final_message()
    texts = [block.text for block in message.content if block.type == "text"]
    assert [block.text for block in last.content if block.type == "text"] == texts
    inputs = [block.input for block in message.content if block.type == "tool_use"]
    assert [block.input for block in last.content if block.type == "tool_use"] == inputs
    assert (last.stop_reason, last.stop_sequence) == (message.stop_reason, stop_sequence)
    assert last.usage.output_tokens == message.usage.output_tokens


def test_more_tokens_than_the_server_gives_are_a_wish(client: Anthropic) -> None:
    assert client.messages.create(**PLAIN | {"max_tokens": 20_000}).content == client.messages.create(**PLAIN).content
    talk = [{"role": "user", "content": "Tell a story."}]
    wordy = CALL | {"messages": talk, "max_tokens": 20_000, "tools": [TOOL | {"input_schema": ENDLESS}]}
    message = client.messages.create(**wordy)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", OUTPUT_TOKENS)
    assert message.usage.to_dict()["max_tokens"] == OUTPUT_TOKENS


def test_an_effort_is_accepted_without_effect(client: Anthropic) -> None:
    usual = client.messages.create(**PLAIN).content
    assert client.messages.create(**PLAIN | {"output_config": {"effort": "xhigh"}}).content == usual


def test_the_events_of_a_stream_come_in_order(plain: httpx2.Client) -> None:
    text = plain.post(MESSAGES_PATH, json=PLAIN | {"stream": True}).text
    events = [event.split("\ndata: ") for event in text.strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in events]
    assert [json.loads(data)["type"] for _, data in events] == names
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_tool_is_called_and_the_conversation_goes_on_after_its_result(client: Anthropic) -> None:
    message = client.messages.create(**CALL)
    [call] = message.content
    assert call.type == "tool_use"
    jsonschema.validate(call.input, PARAMETERS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18", "is_error": True}
    talk = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(**CALL | {"messages": talk})
    assert again.stop_reason == "tool_use"
    counted = client.messages.count_tokens(model=MODEL, messages=talk, tools=[TOOL])  # type: ignore[arg-type,list-item]
    assert counted.input_tokens == again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0)


def test_an_answer_conforms_to_a_schema(client: Anthropic) -> None:
    output = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    message = client.messages.create(**PLAIN | {"output_config": output, "max_tokens": 200})
    jsonschema.validate(json.loads(message.content[0].text), PARAMETERS)  # type: ignore[union-attr]


RESULT: dict[str, Any] = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "18"}]}
USE: dict[str, Any] = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "now", "input": {}}]}
IMAGE = {"role": "user", "content": [{"type": "image", "source": {}}]}


def test_an_empty_answer_and_an_empty_result_may_be_sent_back(client: Anthropic) -> None:
    counts = []
    empties: list[Any] = [[], ""]
    for empty in empties:
        answer = {"role": "assistant", "content": empty}
        result = {"role": "user", "content": [RESULT["content"][0] | {"content": empty}]}
        talk: list[Any] = [*QUESTION, answer, *QUESTION, USE, result]
        counts.append(client.messages.count_tokens(model=MODEL, messages=talk))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content is empty"),
        ({"messages": []}, "messages must have at least 1 item"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages has no message from the user"),
        ({"messages": [*QUESTION, RESULT]}, "the result of a call 'a'"),
        ({"messages": [*QUESTION, USE, *QUESTION]}, "has no result; add a tool_result block with its tool_use_id"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "The"}]}, "end with one from the user"),
        ({"messages": [IMAGE]}, "'image'; use one of 'text', 'tool_use'"),
        ({"messages": [{"role": "user", "content": USE["content"]}]}, "may not hold a block of type tool_use"),
        ({"messages": [{"role": "user", "content": RESULT["content"] * 4097}]}, "4097"),
        ({"messages": [{"role": "user", "content": RESULT["content"] * 4096}], "system": "a"}, "messages is 4097"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "a tool of type 'bash_20250124' is not supported"),
        ({"tools": [TOOL | {"name": "get weather"}]}, "tools.0.name"),
        ({"tools": [TOOL] * 500}, "tools holds 500 functions"),
        ({"tool_choice": {"type": "tool", "name": "now"}}, "the choice of a tool needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice needs a name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking needs a model that reasons"),
        ({"mcp_servers": []}, "mcp_servers is not supported by this server"),
        ({"stop_sequences": ["a"] * 33}, "the number of strings in stop_sequences is 33"),
        ({"best_of": 2}, "unknown parameter 'best_of'"),
        ({"output_config": {"effort": "very"}}, "output_config.effort must be 'low'"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_what_to_change(
    messages: tuple[Served, str], plain: httpx2.Client, fields: dict[str, Any], said: str
) -> None:
    refused = plain.post(MESSAGES_PATH, json=PLAIN | fields)
    assert refused.status_code == 400, refused.text
    body = refused.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert said in body["error"]["message"]
    assert body["request_id"] == refused.headers["x-request-id"] == refused.headers["request-id"]
    settled(messages[0])


def test_errors_have_the_classes_of_the_client(messages: tuple[Served, str], client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'gpt' does not exist here"):
        client.messages.create(**PLAIN | {"model": "gpt"})
    with (
        Anthropic(base_url=messages[0].url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError, match="x-api-key"),
    ):
        stranger.messages.create(**PLAIN)


def test_the_runner_of_tools_goes_on_without_the_thread_that_is_refused(
    client: Anthropic, plain: httpx2.Client
) -> None:
    refused = plain.post(MESSAGES_PATH, json=PLAIN | {"thread": {"type": "create"}})
    assert "leave thread out and send all messages" in refused.json()["error"]["message"]
    runner = client.beta.messages.tool_runner(**PLAIN, tools=[])
    assert runner.until_done().content[0].text == ANSWER  # type: ignore[union-attr]


def test_a_refused_request_costs_other_callers_nothing(messages: tuple[Served, str]) -> None:
    running, key = messages

    async def ask() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=running.url, api_key=key, max_retries=0) as caller:
            bodies = [PLAIN, PLAIN | {"messages": [*QUESTION, RESULT]}, PLAIN]
            return await asyncio.gather(*(caller.messages.create(**body) for body in bodies), return_exceptions=True)

    one, refused, other = asyncio.run(ask())
    assert isinstance(refused, anthropic.BadRequestError)
    assert one.content == other.content
    settled(running)

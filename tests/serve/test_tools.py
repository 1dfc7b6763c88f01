"""Tools on the endpoint: calls are held by a grammar, and what cannot be served is refused before any work."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.serve.endpoint_clients import MODEL, check_error, http, settled
from tests.serve.endpoint_samples import ANSWER, FOLDER, MESSAGES, Served, config_of, served
from tests.serve.request_samples import CHAT
from tests.serve.tool_samples import CALLED, NOW, QUESTION, RESULT, TOOLS, WEATHER, tool

NAMED = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
UNIQUE = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
LOOKING = {"type": "string", "pattern": "a(?=b)"}
PARAMETERS = WEATHER["function"]["parameters"]
CALL: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200}
DECODINGS = [{"mode": "ar"}, {"mode": "exact"}, {"threshold": 0.3, "block": 6}]


@pytest.fixture(scope="module")
def toolless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a template that knows no tools."""
    folder = tmp_path_factory.mktemp("models") / "toolless"
    shutil.copytree(FOLDER, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return folder


@pytest.fixture(scope="module")
def generic(toolless: Path) -> Iterator[Served]:
    """A system message describes the tools."""
    with served(config_of(tool_call_parser="hermes"), folder=toolless) as running:
        yield running


@pytest.fixture(scope="module")
def client(generic: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{generic.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def called(client: OpenAI, **fields: Any) -> list[tuple[str, str]]:
    choice = client.chat.completions.create(**CALL | fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]  # type: ignore[union-attr]


def streamed(client: OpenAI, **fields: Any) -> tuple[list[tuple[str, str]], list[str]]:
    calls: list[list[str]] = []
    reasons = []
    for chunk in client.chat.completions.create(**CALL | fields, stream=True):
        for choice in chunk.choices:
            assert not choice.delta.content
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(calls)
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return [(name, arguments) for name, arguments in calls], reasons


@pytest.mark.parametrize("decoding", DECODINGS)
def test_a_named_function_is_called_and_a_stream_says_the_same(client: OpenAI, decoding: dict[str, Any]) -> None:
    fields = {"temperature": 1, "seed": 3, "extra_body": decoding | {"block": 6}}
    [(name, arguments)] = called(client, **fields)
    jsonschema.validate(json.loads(arguments), PARAMETERS)
    assert streamed(client, **fields) == ([(name, arguments)], ["tool_calls"])
    single = decoding | {"block": 6, "stream_options": {"single_tokens": True}}
    assert streamed(client, **fields | {"extra_body": single})[0] == [(name, arguments)]


@pytest.mark.parametrize("choice", [NAMED, "required", "auto"])
def test_exact_mode_calls_as_one_token_at_a_time_does_in_fewer_forwards(client: OpenAI, choice: Any) -> None:
    fields = CALL | {"tool_choice": choice, "temperature": 1.2, "parallel_tool_calls": False}
    for seed in range(4):
        answers = [
            client.chat.completions.create(**fields, seed=seed, extra_body=decoding) for decoding in DECODINGS[:2]
        ]
        one, exact = (answer.choices[0] for answer in answers)
        assert one.message.content == exact.message.content
        assert [call.function for call in one.message.tool_calls or ()] == [  # type: ignore[union-attr]
            call.function
            for call in exact.message.tool_calls or ()  # type: ignore[union-attr]
        ]


def test_with_required_some_function_is_called(client: OpenAI) -> None:
    for seed in range(5):
        calls = called(client, tool_choice="required", parallel_tool_calls=False, temperature=1.5, seed=seed)
        assert len(calls) == 1
        assert calls[0][0] in ("get_weather", "now")


def test_of_allowed_tools_only_those_are_called(client: OpenAI) -> None:
    for seed in range(5):
        calls = called(client, tool_choice=ALLOWED, temperature=1.5, seed=seed)
        assert {name for name, _ in calls} == {"get_weather"}


def test_with_none_and_with_auto_the_model_may_say_what_it_likes(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    none = client.chat.completions.create(**fields, tool_choice="none")
    assert none.choices[0].message.content == ANSWER
    auto = client.chat.completions.create(**fields, max_tokens=20)
    assert auto.choices[0].message.content is not None


def test_a_call_that_is_cut_says_so(client: OpenAI) -> None:
    [choice] = client.chat.completions.create(**CALL | {"max_tokens": 20}).choices
    assert choice.finish_reason == "length"


def test_a_call_that_a_stop_string_cuts_off_ends_with_stop(client: OpenAI) -> None:
    [choice] = client.chat.completions.create(**CALL, stop=['"city"']).choices
    assert choice.finish_reason == "stop"
    assert streamed(client, stop=['"city"'])[1] == ["stop"]
    [choice] = client.chat.completions.create(**CALL, stop=["</tool_call>"]).choices
    assert choice.finish_reason == "tool_calls"


def test_log_probabilities_come_with_calls(client: OpenAI) -> None:
    [choice] = client.chat.completions.create(**CALL, logprobs=True).choices
    assert choice.logprobs and choice.logprobs.content
    text = "".join(token.token for token in choice.logprobs.content)
    assert text.startswith('<tool_call>\n{"name": "get_weather"')
    stream = client.chat.completions.create(**CALL, logprobs=True, stream=True)
    tokens = [
        token.token
        for chunk in stream
        for each in chunk.choices
        for token in (each.logprobs and each.logprobs.content) or ()
    ]
    assert "".join(tokens) == text


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=3)


def test_a_pydantic_function_is_parsed_by_the_client(client: OpenAI) -> None:
    offered = openai.pydantic_function_tool(GetWeather)
    reply = client.chat.completions.parse(
        **CALL | {"tools": [offered], "tool_choice": "required"}, parallel_tool_calls=False
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_the_streaming_helper_of_the_client_collects_the_call(client: OpenAI) -> None:
    offered = openai.pydantic_function_tool(GetWeather)
    fields = {key: value for key, value in CALL.items() if key not in ("tools", "tool_choice")}
    with client.chat.completions.stream(
        **fields, tools=[offered], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert "tool_calls.function.arguments.delta" in kinds
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_the_older_form_gets_a_function_call(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "functions": [WEATHER["function"]]}
    fields["function_call"] = {"name": "get_weather"}
    [choice] = client.chat.completions.create(**fields).choices  # type: ignore[call-overload]
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    jsonschema.validate(json.loads(choice.message.function_call.arguments), PARAMETERS)
    said = ""
    for chunk in client.chat.completions.create(**fields, stream=True):  # type: ignore[call-overload]
        call = chunk.choices[0].delta.function_call
        said += (call and call.arguments) or ""
    assert said == choice.message.function_call.arguments


def test_a_conversation_goes_on_after_a_result(client: OpenAI) -> None:
    older = [
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    messages = [*QUESTION, CALLED, RESULT, *QUESTION, *older]
    reply = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=5)  # type: ignore[arg-type]
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_an_answer_can_be_sent_back_as_it_came(client: OpenAI) -> None:
    message = client.chat.completions.create(**CALL).choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18"}
    again = client.chat.completions.create(**CALL | {"messages": [*QUESTION, message, result]})
    assert again.choices[0].message.tool_calls


def test_calls_of_two_answers_have_different_ids_even_if_the_requests_have_one_id(client: OpenAI) -> None:
    headers = {"x-request-id": "mine"}
    answers = [client.chat.completions.create(**CALL, extra_headers=headers).choices[0].message for _ in range(2)]
    ids = [call.id for answer in answers for call in answer.tool_calls or ()]
    assert len(ids) == len(set(ids)) > 1


def two_calls(*ids: str) -> dict[str, Any]:
    return CALLED | {"tool_calls": [CALLED["tool_calls"][0] | {"id": id} for id in ids]}


def with_arguments(arguments: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return CALLED | {"tool_calls": [CALLED["tool_calls"][0] | {"function": function}]}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [tool(f"f{n}") for n in range(500)]}, "tools", "500 functions; this server takes at most 128"),
        ({"tools": [tool("get weather")]}, "tools", "tools.0.function.name"),
        ({"tools": [tool("f" * 129)]}, "tools", "tools.0.function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools", "2 functions with the name 'f'; names must differ"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "tools.0"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools", "a schema of the type object"),
        ({"tools": [tool(parameters={"type": "strin"})]}, "tools", "a schema of the type object"),
        ({"tools": [tool(parameters={"properties": {"a": {"type": "strin"}}})]}, "tools",
         "the parameters of f cannot be used: Invalid type: strin."),
        ({"tools": [tool(strict=True, parameters=UNIQUE)]}, "tools",
         'the parameters of f cannot be used: Unimplemented keys: ["uniqueItems"].'),
        ({"tools": [tool(parameters={"properties": {"a": {"enum": ["x" * 100] * 2000}}})]}, None, "Shorten it"),
        ({"tools": [tool(parameters={"properties": {"a": LOOKING}})]}, "tools", "look-around"),
        ({"tool_choice": "required"}, "tool_choice", "the choice of a tool needs tools"),
        ({"tool_choice": NAMED}, "tool_choice", "the choice of a tool needs tools"),
        ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice", "'get_weather' is not in tools"),
        ({"tools": [NOW], "tool_choice": ALLOWED}, "tool_choice", "'get_weather' is not in tools"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "tool_choice must be none, auto, required or an"),
        ({"tools": [NOW], "functions": [NOW["function"]]}, "functions", "not both"),
        ({"functions": [NOW["function"]], "function_call": {"name": "g"}}, "function_call", "'g' is not in functions"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "must be true or false"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "needs a model that reasons"),
        ({"messages": [*QUESTION, CALLED]}, "messages", "the call 'call_1' has no result"),
        ({"messages": [*QUESTION, two_calls(*["a"] * 4097)]}, "messages", "holds 4097 tool calls"),
        ({"messages": [*QUESTION, two_calls("a", "b"), RESULT | {"tool_call_id": "c"}]}, "messages", "a call 'c'"),
        ({"messages": [*QUESTION, with_arguments(json.dumps({"a": "x" * 1_000_000})), RESULT]}, None, "Shorten it"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_what_to_change(
    generic: Served, fields: dict[str, Any], param: str | None, said: str
) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 1} | fields
    with http(generic) as plain:
        response = plain.post(CHAT, json=body)
    code = response.json()["error"]["code"] if response.status_code == 400 else None
    assert code in (None, "context_length_exceeded", "unknown_parameter")
    assert said in check_error(response, 400, param=param, code=code)
    assert len(response.content) < 1500
    settled(generic)


def test_a_model_that_knows_no_tools_says_so(toolless: Path) -> None:
    with served(config_of(), folder=toolless) as running, http(running) as plain:
        for fields, param in (({"tools": TOOLS}, "tools"), ({"functions": [NOW["function"]]}, "functions")):
            refused = plain.post(CHAT, json={"model": MODEL, "messages": QUESTION} | fields)
            said = check_error(refused, 400, param=param, code="unsupported_parameter")
            assert said.startswith("the chat template of this model knows no tools. Leave")
        refused = plain.post(CHAT, json={"model": MODEL, "messages": [*QUESTION, CALLED, RESULT]})
        check_error(refused, 400, param="messages", code="unsupported_parameter")
        answered = plain.post(CHAT, json={"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"})
        assert answered.json()["choices"][0]["message"]["content"] == ANSWER


def test_a_refused_schema_costs_other_callers_nothing(generic: Served, client: OpenAI) -> None:
    bad = CALL | {"tools": [tool("get_weather", parameters={"properties": {"a": {"type": "strin"}}})]}

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{generic.url}/v1", api_key="none", max_retries=0) as caller:
            asking = [caller.chat.completions.create(**each) for each in (CALL, bad, CALL, bad)]
            return await asyncio.gather(*asking, return_exceptions=True)

    one, refused, other, _ = asyncio.run(ask())
    assert isinstance(refused, openai.BadRequestError)
    assert one.choices[0].message.tool_calls[0].function == other.choices[0].message.tool_calls[0].function
    settled(generic)

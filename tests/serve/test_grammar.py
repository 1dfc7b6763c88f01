"""`response_format`: the answer is what was asked for, and what cannot be asked for is refused before any work."""

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.serve.endpoint_clients import MODEL, check_error, http, settled
from tests.serve.endpoint_samples import ANSWER, MESSAGES, Served

CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 80}
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "score": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["mood", "score"],
    "additionalProperties": False,
}


def json_schema(schema: object, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | fields}


@pytest.mark.parametrize("decoding", [{"mode": "ar"}, {"mode": "exact"}, {"threshold": 0.3}])
def test_an_answer_is_of_the_schema_whole_and_streamed(client: OpenAI, decoding: dict[str, Any]) -> None:
    asked = CHAT | {"messages": HELLO, "response_format": json_schema(SCHEMA), "n": 3, "seed": 1}
    asked |= {"temperature": 1, "extra_body": decoding | {"block": 8}}
    choices = client.chat.completions.create(**asked).choices
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in sorted(choices, key=lambda choice: choice.index)]
    for text, choice in zip(texts, choices, strict=True):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert choice.finish_reason == "stop"


def test_a_pydantic_model_is_parsed_by_the_client(client: OpenAI) -> None:
    class Feeling(BaseModel):
        mood: Literal["good", "bad"]
        sure: bool

    reply = client.chat.completions.parse(**CHAT | {"messages": HELLO, "response_format": Feeling})
    assert isinstance(reply.choices[0].message.parsed, Feeling)


def test_any_object_and_any_text_are_formats_too(client: OpenAI) -> None:
    for kind in ("json_object", "text"):
        reply = client.chat.completions.create(**CHAT, response_format={"type": kind})
        assert reply.choices[0].message.content == ANSWER


def test_a_completion_takes_a_format_too(client: OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=60, extra_body={"response_format": json_schema(SCHEMA, strict=False)}
    )
    jsonschema.validate(json.loads(reply.choices[0].text), SCHEMA)


def test_an_answer_that_is_cut_says_so(client: OpenAI) -> None:
    asked = CHAT | {"max_tokens": 3, "response_format": json_schema({"const": "a long text, " * 9})}
    assert client.chat.completions.create(**asked).choices[0].finish_reason == "length"


def test_log_probabilities_are_those_of_every_token(client: OpenAI) -> None:
    asked = CHAT | {"response_format": json_schema(SCHEMA), "logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs and choice.logprobs.content and choice.message.content
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"type": "xml"}, "xml"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "name"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}}, "name"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}, "schema"),
        ({"type": "regex", "regex": "a"}, "regex"),
        ({"type": "text", "strict": True}, "strict"),
        (json_schema({"type": "strin"}), "Invalid type: strin"),
        (json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (json_schema({"$ref": "https://example.org/schema"}), "example.org"),
        (json_schema({"$ref": "file:///etc/passwd"}), "/etc/passwd"),
        (json_schema({"enum": []}), "Unsatisfiable"),
        (json_schema({"enum": ["x" * 100] * 400}), "characters"),
        (json_schema({"pattern": "a(?=b)", "type": "string"}), "look-around"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_format_that_cannot_be_served_is_refused_by_name(
    endpoint: Served, path: str, asked: dict[str, Any], said: str
) -> None:
    body = {"model": MODEL} | ({"messages": MESSAGES} if "chat" in path else {"prompt": "Hello"})
    with http(endpoint) as plain:
        response = plain.post(path, json=body | {"response_format": asked})
    code = "unknown_parameter" if "unknown parameter" in response.text else None
    assert said in check_error(response, 400, param="response_format", code=code)


def test_a_refused_schema_leaves_nothing_behind(client: OpenAI, endpoint: Served) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**CHAT, response_format=json_schema({"type": "string", "pattern": "("}))
    settled(endpoint)
    assert client.chat.completions.create(**CHAT).choices[0].message.content == ANSWER

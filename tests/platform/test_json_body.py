"""Bodies that are no JSON, or no text within it, are refused by their place, and cost no more than their size."""

import gzip
import json
import tracemalloc
from typing import Any

import httpx2
import pytest

from mars_ray.openai_api.api_error import ApiError
from mars_ray.platform.anthropic.messages import uses_messages_api
from mars_ray.serve.middleware.json_body import parse
from tests.serve.endpoint_clients import check_anthropic_error, check_error
from tests.serve.request_samples import CHAT, COMPLETIONS, LEAST

DEPTH = 190


@pytest.mark.parametrize("half", ["\\\\ud83d", "\\ud83d\\ude00", "x"], ids=["looks like half", "pair", "none"])
def test_a_body_that_is_deep_and_wide_takes_memory_for_its_items_and_not_for_their_places(half: str) -> None:
    items = ",".join(["0"] * 100_000)
    body = ("[" * DEPTH + f'"{half}",{items}' + "]" * DEPTH).encode()
    tracemalloc.start()
    try:
        parse(body)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('"\\ud83d"', "the body"),
        ('{"a": {"b": ["x", "\\ud83d"]}}', "a.b.1"),
        ('{"a": "x\\ude00"}', "a"),
        ('{"a": {"\\ud83d": 1}}', "a"),
        ('{"a": "\\ud83d\\ude00 \\ud83d"}', "a"),
    ],
)
def test_half_a_character_is_named_by_its_place(body: str, place: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(body.encode())
    message = raised.value.body()["error"]["message"]
    assert message is not None and message.startswith(f"{place} holds")


def test_an_escaped_backslash_before_what_looks_like_half_a_character_is_taken() -> None:
    assert parse(b'{"a": "\\\\ud83d"}') == {"a": json.loads('"\\\\ud83d"')}


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a\ud800"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"content": [{"type": "text", "text": "\udc00"}]}]}, "messages.0.content.0.text"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}, "messages.0.name"),
        (CHAT, {"stop": ["a", "\ud800"]}, "stop.1"),
        (CHAT, {"model": "\ud800"}, "model"),
        (CHAT, {"user": "\ud800"}, "user"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools.0.function.name"),
        (CHAT, {"logit_bias": {"\ud800": 1}}, "logit_bias"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"\ud800": 1}}}},
         "response_format.json_schema.schema"),
        (COMPLETIONS, {"prompt": "\ud83d \ude00"}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "\ud800"]}, "prompt.1"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/control/threshold", {"threshold": 0.95, "service_class": "\ud800"}, "service_class"),
    ],
)  # fmt: skip
def test_half_of_a_surrogate_pair_is_refused_by_its_field(
    plain: httpx2.Client, path: str, fields: dict[str, Any], place: str
) -> None:
    content = json.dumps(LEAST.get(path, {}) | fields)
    method = "PUT" if path.startswith("/control") else "POST"
    refused = plain.request(method, path, content=content, headers={"content-type": "application/json"})
    said = check_error(refused, 400, param=place.partition(".")[0])
    assert said.startswith(place)
    assert "half of a surrogate pair" in said


def test_a_whole_surrogate_pair_is_the_character_it_spells(plain: httpx2.Client) -> None:
    spelt = [json.dumps({"prompt": "\U0001f600"}, ensure_ascii=ascii).encode() for ascii in (True, False)]
    assert spelt[0] != spelt[1]
    head = {"content-type": "application/json; charset=utf-8"}
    one, other = (plain.post("/tokenize", content=body, headers=head).json() for body in spelt)
    assert one["tokens"] == other["tokens"]


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "application", "a/b;"])
def test_a_body_that_is_not_said_to_be_json_is_refused_by_its_header(
    plain: httpx2.Client, path: str, kind: str | None
) -> None:
    head = {} if kind is None else {"content-type": kind}
    refused = plain.post(path, content=json.dumps(LEAST[path]), headers=head)
    if uses_messages_api(path):
        said = check_anthropic_error(refused, 415)
    else:
        said = check_error(refused, 415, code="unsupported_media_type")
    assert f"The Content-Type is {kind or 'missing'}; send JSON" in said


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_an_encoded_body_is_refused_by_its_header(plain: httpx2.Client, encoding: str) -> None:
    head = {"content-type": "application/json", "content-encoding": encoding}
    refused = plain.post(CHAT, content=gzip.compress(json.dumps(LEAST[CHAT]).encode()), headers=head)
    assert encoding in check_error(refused, 415, code="unsupported_encoding")
    assert refused.headers["accept-encoding"] == "identity"
    assert plain.post(CHAT, json=LEAST[CHAT], headers={"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model": "bundled",\n "prompt" "a"}', "line 2, column 11"),
        (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "byte 0 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_what_is_no_json_is_told_where(plain: httpx2.Client, body: bytes, said: str) -> None:
    refused = plain.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert said in check_error(refused, 400, code="invalid_json")

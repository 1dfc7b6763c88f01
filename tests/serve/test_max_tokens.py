"""A `max_tokens` above the server's limit or the room in the context is lowered, and the answer says so."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.mode import Mode
from mars_ray.engine.process.messages import EngineFacts
from mars_ray.engine.request import Request
from mars_ray.errors import PromptTooLongError, RequestError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.openai_api.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.openai_api.translate import check_limits, engine_requests, lowered_max_tokens
from tests.serve.endpoint_clients import check_error, http
from tests.serve.endpoint_samples import config_of, served
from tests.serve.request_samples import CHAT, COMPLETIONS, LEAST, MESSAGES_PATH, RESPONSES

LIMIT = 8
"""The server's limit on the tokens of an answer."""
FIELDS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (COMPLETIONS, "max_tokens"),
    pytest.param(RESPONSES, "max_output_tokens", marks=pytest.mark.platform),
    pytest.param(MESSAGES_PATH, "max_tokens", marks=pytest.mark.platform),
]
TOO_MANY = [LIMIT + 1, 32_000, 10**30, 10**400]


@pytest.fixture(scope="module")
def short() -> Iterator[httpx2.Client]:
    with served(config_of(limits={"output_tokens": LIMIT})) as running, http(running) as client:
        yield client


def body_of(path: str, field: str, tokens: int, **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in LEAST[path].items() if name != "max_tokens"} | {field: tokens} | fields


def lowered(response: httpx2.Response) -> int | None:
    """What a response says that the maximum was lowered to; header and usage must agree."""
    assert response.status_code == 200, response.text
    usages = (
        [response.json()["usage"]] if response.headers["content-type"] == "application/json" else usages_of(response)
    )
    shown = {usage.get("max_tokens", usage.get("max_output_tokens")) for usage in usages}
    header = response.headers.get("x-mars-max-tokens")
    assert shown == {None if header is None else int(header)}
    return shown.pop()


def usages_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The usage at the end of a stream."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    usages = [event.get("usage") or (event.get("response") or {}).get("usage") for event in events]
    return [usage for usage in usages if usage][-1:]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_more_than_the_server_gives_is_lowered_and_the_answer_says_so(
    short: httpx2.Client, path: str, field: str, stream: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if stream and path in (CHAT, COMPLETIONS) else {}
    for tokens in TOO_MANY:
        assert lowered(short.post(path, json=body_of(path, field, tokens, stream=stream, **options))) == LIMIT
    assert lowered(short.post(path, json=body_of(path, field, LIMIT, stream=stream, **options))) is None


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_more_than_the_context_holds_is_lowered_and_the_answer_says_so(
    plain: httpx2.Client, path: str, field: str
) -> None:
    prompt = "Hello " * 800
    names = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input", MESSAGES_PATH: "messages"}
    long = {names[path]: [{"role": "user", "content": prompt}] if names[path] == "messages" else prompt}
    schema = {"type": "object", "properties": {}, "additionalProperties": False}  # for a short answer
    form = {"json_schema": {"name": "a", "schema": schema}, "type": "json_schema"}
    short_answers: dict[str, dict[str, Any]] = {
        CHAT: {"response_format": form},
        COMPLETIONS: {"response_format": form},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
        MESSAGES_PATH: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }
    usage = plain.post(path, json=body_of(path, field, 1, **long)).json()["usage"]
    prompt_tokens = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    context = plain.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"]
    room = context - prompt_tokens
    assert 0 < room < RequestLimits().output_tokens
    assert lowered(plain.post(path, json=body_of(path, field, room, **long, **short_answers[path]))) is None
    for tokens in (room + 1, 10**6, 10**400):
        assert lowered(plain.post(path, json=body_of(path, field, tokens, **long, **short_answers[path]))) == room


@pytest.mark.platform
def test_an_answer_that_sets_no_length_is_not_called_lowered(short: httpx2.Client) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES):
        body = {name: value for name, value in LEAST[path].items() if not name.startswith("max_")}
        answer = short.post(path, json=body)
        assert lowered(answer) is None
        usage = answer.json()["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == LIMIT or path == CHAT


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fewer_tokens_than_min_tokens_are_never_given(short: httpx2.Client, path: str) -> None:
    refused = short.post(path, json=body_of(path, "max_tokens", 32_000, min_tokens=LIMIT + 1))
    assert f"this answer may have up to {LIMIT} tokens. Lower" in check_error(refused, 400, param="min_tokens")
    refused = short.post(path, json=body_of(path, "max_tokens", 2, min_tokens=3))
    assert "this answer may have up to 2 tokens. Raise" in check_error(refused, 400, param="min_tokens")
    assert lowered(short.post(path, json=body_of(path, "max_tokens", 32_000, min_tokens=LIMIT))) == LIMIT


def requests_of(body: GenerateRequest, prompts: list[list[int]], context: int, limits: RequestLimits) -> list[Request]:
    facts = EngineFacts(max_model_len=context, vocab_size=100, block=1, token_bytes=(b"a",) * 100)
    return engine_requests(
        body,
        prompts,
        request_id="a",
        tenant="",
        service_class="standard",
        model=ModelInfo(name="m", created=0, engine=facts),
        limits=limits,
        default_mode=Mode.AR,
        default_sampling={},
    )


def test_a_prompt_of_which_only_scores_are_wanted_may_fill_the_context() -> None:
    scored, answered = (
        CompletionRequest.model_validate(LEAST[COMPLETIONS] | {"max_tokens": tokens, "echo": True, "logprobs": 0})
        for tokens in (0, 1)
    )
    [request] = requests_of(scored, [[1] * 50], 50, RequestLimits())
    assert (len(request.prompt), request.sampling.max_tokens) == (50, 0)
    with pytest.raises(PromptTooLongError, match=r"has 51 tokens; it may have up to 50\. Shorten"):
        requests_of(scored, [[1] * 51], 50, RequestLimits())
    with pytest.raises(PromptTooLongError, match="has 50 tokens; it may have up to 49, to leave room for an answer"):
        requests_of(answered, [[1] * 50], 50, RequestLimits())


@given(
    chat=st.booleans(),
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    tokens=st.none() | st.integers(1, 100) | st.integers(1, 10**40),
    min_tokens=st.integers(0, 100),
    limit=st.integers(1, 100),
)
def test_an_answer_gets_the_least_of_what_is_set_the_limit_and_the_room(
    chat: bool, prompts: list[int], tokens: int | None, min_tokens: int, limit: int
) -> None:
    context = 50
    limits = RequestLimits(output_tokens=limit)
    path, kind = (CHAT, ChatCompletionRequest) if chat else (COMPLETIONS, CompletionRequest)
    prompts = prompts[:1] if chat else prompts
    body = kind.model_validate(LEAST[path] | {"max_tokens": tokens, "min_tokens": min_tokens})
    check_limits(body, limits)
    rooms = [min(limit, context - prompt) for prompt in prompts]
    wanted = tokens or (max(min_tokens, limits.default_output_tokens) if chat else 16)
    expected = [min(wanted, room) for room in rooms]
    if min_tokens > min(expected):
        with pytest.raises(RequestError, match="min_tokens"):
            requests_of(body, [[1] * prompt for prompt in prompts], context, limits)
        return
    requests = requests_of(body, [[1] * prompt for prompt in prompts], context, limits)
    assert [request.sampling.max_tokens for request in requests] == expected
    assert all(request.sampling.min_tokens == min_tokens for request in requests)
    assert lowered_max_tokens(body, requests) == (min(expected) if tokens and tokens > min(expected) else None)

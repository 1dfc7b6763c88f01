"""Every field a body may have is acted upon, known to change nothing, or refused by name."""

import json
from typing import Any, get_args

import httpx2
import pytest
from openai.types import completion_create_params, shared
from openai.types.chat import chat_completion_message_param
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from mars_ray.engine.request import SamplingParams
from mars_ray.errors import RequestError
from mars_ray.openai_api.protocol import IGNORED, NEUTRAL, ChatCompletionRequest, CompletionRequest, GenerateRequest
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.openai_api.translate import check_limits
from tests.serve.endpoint_clients import check_anthropic_error, check_error
from tests.serve.endpoint_samples import MESSAGES
from tests.serve.request_samples import CHAT, COMPLETIONS, LEAST, MESSAGES_PATH

BODIES: dict[str, type[GenerateRequest]] = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}

OFFERED = {
    CHAT: set(chat_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"},
    COMPLETIONS: set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"},
}
"""What the installed `openai` package can send."""

CHANGING: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": True},
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "web_search_options": {},
}
"""For each field of `NEUTRAL` a value that asks for something."""


@pytest.mark.parametrize("path", BODIES)
def test_every_field_the_openai_package_can_send_was_thought_about(path: str) -> None:
    known = set(BODIES[path].model_fields) | IGNORED | NEUTRAL.keys()
    assert OFFERED[path] <= known, "a new version of openai: act upon these fields, ignore them or refuse them"


def test_no_field_is_in_two_of_the_three_groups() -> None:
    fields = set(ChatCompletionRequest.model_fields) | set(CompletionRequest.model_fields)
    assert not fields & IGNORED
    assert not fields & NEUTRAL.keys()
    assert not IGNORED & NEUTRAL.keys()
    assert CHANGING.keys() == NEUTRAL.keys()


def test_every_role_the_openai_package_can_send_was_thought_about() -> None:
    names = [name for name in dir(chat_completion_message_param) if name.endswith("MessageParam")]
    roles = {name.removeprefix("ChatCompletion").removesuffix("MessageParam").lower() for name in names} - {""}
    assert roles == {"assistant", "developer", "function", "system", "tool", "user"}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(
    plain: httpx2.Client, path: str, name: str
) -> None:
    refused = plain.post(path, json=LEAST[path] | {name: CHANGING[name]})
    assert name in check_error(refused, 400, param=name, code="unsupported_parameter")
    for value in (None, *NEUTRAL[name]):
        BODIES[path].model_validate(LEAST[path] | {name: value})


def test_what_is_not_supported_is_refused_together(plain: httpx2.Client) -> None:
    fields = {name: CHANGING[name] for name in ("audio", "modalities", "web_search_options")}
    said = check_error(plain.post(CHAT, json=LEAST[CHAT] | fields), 400, param="audio", code="unsupported_parameter")
    assert said == "audio, modalities and web_search_options are not supported by this server; leave them out."


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/speech", "/v1/assistants", "/v1/", "/v1"])
def test_a_path_of_another_api_is_a_404_that_names_what_is_served(plain: httpx2.Client, path: str) -> None:
    for response in (plain.post(path, json=LEAST[CHAT]), plain.get(path)):
        assert "/v1/chat/completions, /v1/completions" in check_error(response, 404, code="unknown_url")


@pytest.mark.parametrize("path", BODIES)
def test_what_does_not_change_the_answer_is_accepted_whatever_it_says(plain: httpx2.Client, path: str) -> None:
    for value in ("x", 5, {"a": [1]}, True, None):
        assert plain.post(path, json=LEAST[path] | dict.fromkeys(IGNORED, value)).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_an_effort_of_reasoning_is_accepted_without_effect(plain: httpx2.Client, path: str) -> None:
    [efforts] = (get_args(kind) for kind in get_args(shared.ReasoningEffort) if get_args(kind))
    usual = plain.post(path, json=LEAST[path]).json()["choices"]
    for effort in (None, *efforts):
        answer = plain.post(path, json=LEAST[path] | {"reasoning_effort": effort})
        assert (answer.status_code, answer.json()["choices"]) == (200, usual), (effort, answer.text)


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("name", ["temprature", "chat_template_", "Model", "__class__", ""])
def test_an_unknown_field_is_refused_by_name(plain: httpx2.Client, path: str, name: str) -> None:
    refused = plain.post(path, json=LEAST[path] | {name: 1})
    if path.startswith(MESSAGES_PATH):
        assert repr(name) in check_anthropic_error(refused, 400)
    else:
        assert repr(name) in check_error(refused, 400, param=name, code="unknown_parameter")


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("name", ["chat_template", "chat_template_kwargs"])
def test_no_route_takes_a_chat_template(plain: httpx2.Client, path: str, name: str) -> None:
    refused = plain.post(path, json=LEAST[path] | {name: CHANGING[name]})
    if path.startswith(MESSAGES_PATH):
        assert name in check_anthropic_error(refused, 400)
    else:
        check_error(refused, 400, param=name, code="unsupported_parameter" if path in BODIES else "unknown_parameter")


def tokens_of(plain: httpx2.Client, *messages: dict[str, Any]) -> list[int]:
    """The prompt of a conversation that ends with a question."""
    reply = plain.post("/tokenize", json={"messages": [*MESSAGES, *messages, *MESSAGES]})
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["tokens"]
    return tokens


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": None, "tool_calls": [], "function_call": None, "audio": None, "annotations": []}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "text", "text": "I say: "}, {"type": "refusal", "refusal": "No."}]}, "I say: No."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
    ],
)
def test_an_answer_comes_back_as_openais_clients_send_it(plain: httpx2.Client, turn: dict[str, Any], text: str) -> None:
    assert tokens_of(plain, {"role": "assistant"} | turn) == tokens_of(plain, {"role": "assistant", "content": text})


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"content": None, "tool_calls": [{"id": "1"}]}, "tool_calls.0.function is missing"),
        ({"content": None, "function_call": {"name": "f"}}, "function_call.arguments is missing"),
    ],
)
def test_what_else_an_answer_held_is_refused_by_name(plain: httpx2.Client, turn: dict[str, Any], said: str) -> None:
    body = {"messages": [*MESSAGES, {"role": "assistant"} | turn]}
    assert said in check_error(plain.post("/tokenize", json=body), 400, param="messages")


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "Hello",
        [{}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{}]}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
    ],
)
def test_malformed_conversations_are_refused(plain: httpx2.Client, messages: Any) -> None:
    response = plain.post(CHAT, json=LEAST[CHAT] | {"messages": messages})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (COMPLETIONS, {"prompt": 5}, "prompt must be text or a list."),
        (COMPLETIONS, {"prompt": [5.5]}, "prompt.0 must be text, a whole number or a list."),
        (CHAT, {"stop": [5]}, "stop.0 must be text."),
        (CHAT, {"stop": ["a", ""]}, "a stop string is empty; leave it out."),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text is missing.",
        ),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content is missing."),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing."),
        (
            CHAT,
            {"response_format": {"type": "xml"}},
            "response_format has the unknown 'type' 'xml'; use one of 'text', ",
        ),
        (CHAT, {"temperature": 3}, "temperature must be less than or equal to 2."),
        (CHAT, {"max_tokens": 1.5}, "max_tokens must be a whole number."),
        (CHAT, {"messages": []}, "messages must have at least 1 item."),
    ],
)
def test_a_refusal_says_in_plain_words_what_a_field_must_be(
    plain: httpx2.Client, path: str, fields: dict[str, Any], said: str
) -> None:
    [name] = fields
    assert check_error(plain.post(path, json=LEAST[path] | fields), 400, param=name).startswith(said)


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 2.5), ("max_tokens", True),
    ("min_tokens", -1), ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"),
    ("temperature", True), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", 1.5), ("n", 0),
    ("n", "2"), ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.5), ("stop", 5), ("stop", [5]), ("stop", [None]),
    ("stop", {}), ("stop_token_ids", ["5"]), ("stop_token_ids", 5), ("ignore_eos", "yes"), ("ignore_eos", 1),
    ("logit_bias", {"5": 101}), ("logit_bias", {"5": "1"}), ("logit_bias", [5]), ("logit_bias", {"five": 1}),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("threshold", 1.01),
    ("threshold", -0.01), ("threshold", "0.5"), ("threshold_floor", 2), ("mode", "fast"), ("mode", 1), ("block", 0),
    ("block", 65), ("model", 5), ("model", False), ("model", []), ("stream", "yes"), ("stream", 1),
    ("stream_options", True), ("stream_options", {"include_usage": "yes"}), ("stream_options", {"unknown": True}),
    ("logprobs", -1), ("logprobs", "x"), ("reasoning_effort", "very"), ("reasoning_effort", 1),
    ("reasoning_effort", ""), ("reasoning_effort", ["low"]),
]  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=lambda value: json.dumps(value)[:24])
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused_by_its_field(
    plain: httpx2.Client, path: str, name: str, value: Any
) -> None:
    response = plain.post(path, json=LEAST[path] | {name: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == name


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], ["a", ""], [[5], []], ["a", 5], ["a", [5]], 5, [5.5], {}, [True]]
)
def test_a_malformed_or_empty_prompt_is_refused(plain: httpx2.Client, prompt: Any) -> None:
    response = plain.post(COMPLETIONS, json=LEAST[COMPLETIONS] | {"prompt": prompt})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("name", ["prompt", "logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token", [-1, 10**6, 10**30])
def test_an_id_that_is_no_token_is_refused(plain: httpx2.Client, name: str, token: int) -> None:
    value: Any = {str(token): 1} if name == "logit_bias" else [token]
    response = plain.post(COMPLETIONS, json=LEAST[COMPLETIONS] | {name: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("path", BODIES)
def test_null_means_that_a_field_was_left_out(plain: httpx2.Client, path: str) -> None:
    fields = set(BODIES[path].model_fields) | NEUTRAL.keys() | IGNORED
    assert plain.post(path, json=dict.fromkeys(fields) | LEAST[path]).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"threshold": 0.5, "threshold_floor": 0.5}, "threshold_floor"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        (CHAT, {"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        (COMPLETIONS, {"max_tokens": None, "min_tokens": 17}, "min_tokens"),
        ("/tokenize", {"messages": MESSAGES}, None),
        ("/tokenize", {"prompt": None}, None),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    plain: httpx2.Client, path: str, fields: dict[str, Any], param: str | None
) -> None:
    check_error(plain.post(path, json=LEAST[path] | fields), 400, param=param)


LIMITS = RequestLimits(n=2, prompts=2, top_logprobs=2, stop=2, stop_chars=3, logit_bias=2, messages=2)


@pytest.mark.parametrize(
    ("kind", "param", "most", "more"),
    [
        (CompletionRequest, "n", 2, 3),
        (ChatCompletionRequest, "top_logprobs", 2, 3),
        (CompletionRequest, "logprobs", 2, 3),
        (CompletionRequest, "stop", ["abc", "abc"], ["a", "b", "c"]),
        (CompletionRequest, "stop", "abc", "abcd"),
        (CompletionRequest, "stop_token_ids", [1, 2], [1, 2, 3]),
        (CompletionRequest, "logit_bias", {"1": 1.0, "2": 1.0}, {"1": 1.0, "2": 1.0, "3": 1.0}),
        (CompletionRequest, "prompt", ["a", "b"], ["a", "b", "c"]),
        (CompletionRequest, "prompt", [[1], [2]], [[1], [2], [3]]),
        (ChatCompletionRequest, "messages", MESSAGES * 2, MESSAGES * 3),
    ],
)
def test_a_limit_is_the_most_that_is_taken(kind: type[GenerateRequest], param: str, most: Any, more: Any) -> None:
    least = LEAST[CHAT] | {"logprobs": True} if kind is ChatCompletionRequest else LEAST[COMPLETIONS]
    check_limits(kind.model_validate(least | {param: most}), LIMITS)
    with pytest.raises(RequestError) as refused:
        check_limits(kind.model_validate(least | {param: more}), LIMITS)
    assert refused.value.param == param


def test_the_engine_takes_as_much_as_the_gateway_lets_through() -> None:
    most = RequestLimits()
    stops = ("a" * most.stop_chars,) * most.stop
    assert SamplingParams(stop=stops, n=most.n, logprobs=most.top_logprobs).stop == stops
    with pytest.raises(ValidationError, match="stop"):
        RequestLimits(stop=1000)


def test_a_file_may_be_completed_from_its_beginning() -> None:
    check_limits(CompletionRequest.model_validate(LEAST[COMPLETIONS] | {"prompt": "", "suffix": "b"}), LIMITS)
    with pytest.raises(RequestError, match="the prompt is empty"):
        check_limits(CompletionRequest.model_validate(LEAST[COMPLETIONS] | {"prompt": ""}), LIMITS)


def test_a_checked_body_does_not_change() -> None:
    body = CompletionRequest.model_validate(LEAST[COMPLETIONS])
    with pytest.raises(ValidationError):
        body.n = 2  # type: ignore[misc]


@pytest.mark.parametrize("path", LEAST)
def test_an_error_quotes_little_of_what_a_caller_made_up(plain: httpx2.Client, path: str) -> None:
    for fields in ({"x" * 50_000: 1}, {"model": "x" * 50_000}, {"logit_bias": {"x" * 50_000: 1000}}):
        response = plain.post(path, json=LEAST[path] | fields)
        assert response.status_code in (400, 404)
        assert len(response.content) < 500

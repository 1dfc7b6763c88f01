"""Batch files of OpenAI's: what a line may ask for, and what its answer looks like."""

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion

from mars_ray.batch.rows.columns import Survey
from mars_ray.batch.rows.openai_format import (
    CHAT,
    COMPLETIONS,
    OpenAIBatchFormat,
    OpenAIFormatSettings,
    is_openai_batch,
)
from mars_ray.batch.rows.row_ids import RowId, RowIdAssigner
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.chunk import Chunk, Finished, TokenLogprobs
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import BadRecordError, PromptTooLongError, ReplicaLostError, RequestError, StepError
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.rows import json_values

MESSAGES = [{"role": "user", "content": "why?"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "gpt-whatever", "messages": MESSAGES},
    COMPLETIONS: {"model": "gpt-whatever", "prompt": "why?"},
}
SETTINGS = OpenAIFormatSettings(model_name="ours", decode=DecodeParams(mode=Mode.EXACT, threshold=0.9, block=4))


@pytest.fixture(scope="module")
def row_format(checkpoint: Checkpoint) -> OpenAIBatchFormat:
    return OpenAIBatchFormat(SETTINGS, checkpoint.tokenizer, positions=128, clock=lambda: 1e9)


def raw(url: Any = CHAT, *, method: Any = "POST", custom_id: Any = "row-1", **body: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": method, "url": url, "body": LEAST.get(str(url), {}) | body}
    return json.dumps(fields).encode()


def answer_of(checkpoint: Checkpoint, text: str, *, logprobs: bool = False, index: int = 0) -> Chunk:
    """An answer that a stop token ended."""
    encoded = checkpoint.tokenizer(text)
    tokens = (*encoded["input_ids"], checkpoint.tokenizer.eos_token_id)
    starts = (*(encoded.token_to_chars(number).start for number in range(len(tokens) - 1)), None)
    return Chunk(
        request_id="",
        index=index,
        pieces=(text,),
        tokens=tokens,
        logprobs=tuple(
            TokenLogprobs(-0.5, ((token, -0.5),), start) for token, start in zip(tokens, starts, strict=True)
        )
        if logprobs
        else (),
        threshold=0.9,
        finished=Finished(
            reason="stop", prompt_tokens=7, cached_tokens=0, tokens=len(tokens), forwards=2, queued_s=0.0
        ),
    )


def row_id_of(text: bytes) -> RowId:
    with RowIdAssigner("custom_id") as row_ids:
        return row_ids.assign(text, Survey().add(text))


def refusal(row_format: OpenAIBatchFormat, text: bytes) -> dict[str, Any]:
    with pytest.raises((BadRecordError, RequestError)) as caught:
        row_format.parse("row-1", text)
    return row_format.error_record(row_id_of(text), text, caught.value)


def test_a_conversation_is_asked_as_the_endpoint_would(row_format: OpenAIBatchFormat, checkpoint: Checkpoint) -> None:
    row = row_format.parse("row-1", raw(seed=3, n=2, max_tokens=5, stop="!"))
    assert row.request.prompt == tuple(ChatEncoder(checkpoint.tokenizer).prompt(MESSAGES))
    sampling = row.request.sampling
    assert (sampling.temperature, sampling.seed, sampling.n, sampling.max_tokens) == (0.0, 3, 2, 5)
    assert (sampling.stop, row.prompt_text) == (("!",), "why?")


@pytest.mark.parametrize("prompt", ["why?", ["why?"]], ids=str)
def test_a_completion_is_asked_as_the_endpoint_would(
    row_format: OpenAIBatchFormat, checkpoint: Checkpoint, prompt: Any
) -> None:
    ids = checkpoint.tokenizer("why?")["input_ids"]
    row = row_format.parse("row-1", raw(COMPLETIONS, prompt=prompt))
    assert (row.request.prompt, row.request.sampling.max_tokens, row.prompt_text) == (tuple(ids), 16, "why?")


def test_a_prompt_may_be_tokens(row_format: OpenAIBatchFormat) -> None:
    for ids in ([5, 6], [[5, 6]]):
        row = row_format.parse("row-1", raw(COMPLETIONS, prompt=ids))
        assert (row.request.prompt, row.prompt_text) == ((5, 6), "[5, 6]")
    row_format.parse("row-1", raw(COMPLETIONS, prompt=[-1]))  # left to the engine, which knows the vocabulary


def test_an_answer_ends_where_the_context_does(row_format: OpenAIBatchFormat) -> None:
    request = row_format.parse("row-1", raw(max_tokens=128)).request
    assert request.sampling.max_tokens == 128 - len(request.prompt)
    assert row_format.parse("row-1", raw()).request == request


def test_the_job_says_how_to_decode_where_the_body_does_not(row_format: OpenAIBatchFormat) -> None:
    def decode(**body: Any) -> DecodeParams:
        return row_format.parse("row-1", raw(**body)).request.decode

    assert decode() == SETTINGS.decode
    assert decode(threshold=0.5) == replace(SETTINGS.decode, threshold=0.5)
    assert decode(threshold_floor=0.5, block=2) == DecodeParams(mode=Mode.EXACT, floor=0.5, block=2)
    assert decode(mode="ar") == replace(SETTINGS.decode, mode=Mode.AR)


def test_each_of_several_completions_may_echo_its_prompt(row_format: OpenAIBatchFormat, checkpoint: Checkpoint) -> None:
    row = row_format.parse("row-1", raw(COMPLETIONS, n=2, echo=True))
    [line] = row_format.output_records(row, [answer_of(checkpoint, "so", index=index) for index in range(2)])
    body = Completion.model_validate(line["response"]["body"])
    assert [choice.text for choice in body.choices] == ["why?so"] * 2


def test_an_answer_is_a_line_of_openais_output_file(row_format: OpenAIBatchFormat, checkpoint: Checkpoint) -> None:
    row = row_format.parse("row-1", raw(n=2))
    answers = [answer_of(checkpoint, "so"), answer_of(checkpoint, "for å", logprobs=True, index=1)]
    [line] = row_format.output_records(row, answers)
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert (line["custom_id"], line["error"]) == ("row-1", None)
    assert line["id"].startswith("batch_req_")
    assert line["response"].keys() == {"status_code", "request_id", "body"}
    assert line["response"]["status_code"] == 200
    body = ChatCompletion.model_validate(line["response"]["body"])
    assert (body.model, body.created) == ("ours", 1_000_000_000)
    assert [(each.index, each.message.content, each.finish_reason) for each in body.choices] == [
        (0, "so", "stop"),
        (1, "for å", "stop"),
    ]
    assert body.usage is not None
    assert body.usage.prompt_tokens == len(row.request.prompt)
    assert body.usage.completion_tokens == sum(len(each.tokens) for each in answers)
    assert body.choices[1].logprobs is not None
    assert body.choices[1].logprobs.content is not None
    assert len(body.choices[1].logprobs.content) == len(answers[1].tokens) - 1, "the stop token is no text"
    assert row_format.output_records(row, answers) == [line]


@pytest.mark.parametrize("url", LEAST)
@pytest.mark.parametrize("model", [None, "", "gpt-whatever"])
def test_a_body_names_any_model_or_none(
    row_format: OpenAIBatchFormat, checkpoint: Checkpoint, url: str, model: str | None
) -> None:
    row = row_format.parse("row-1", raw(url, model=model))
    [line] = row_format.output_records(row, [answer_of(checkpoint, "so")])
    assert line["response"]["body"]["model"] == "ours"
    assert row_format.parse("row-1", json.dumps(without_model(url)).encode()).request == row.request


def without_model(url: str) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(raw(url))
    del line["body"]["model"]
    return line


@pytest.mark.parametrize("url", LEAST)
def test_a_max_tokens_above_the_context_is_lowered_and_the_usage_says_so(
    row_format: OpenAIBatchFormat, checkpoint: Checkpoint, url: str
) -> None:
    room = 128 - len(row_format.parse("row-1", raw(url)).request.prompt)
    for max_tokens, lowered in ((room, None), (room + 1, room), (10**30, room)):
        row = row_format.parse("row-1", raw(url, max_tokens=max_tokens))
        [line] = row_format.output_records(row, [answer_of(checkpoint, "so")])
        assert line["response"]["body"]["usage"].get("max_tokens") == lowered
        assert row.request.sampling.max_tokens == room


def test_a_completion_says_where_in_the_text_its_tokens_are(
    row_format: OpenAIBatchFormat, checkpoint: Checkpoint
) -> None:
    row = row_format.parse("row-1", raw(COMPLETIONS, logprobs=1))
    [line] = row_format.output_records(row, [answer_of(checkpoint, "aåb", logprobs=True)])
    [choice] = Completion.model_validate(line["response"]["body"]).choices
    assert choice.text == "aåb"
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset == [0, 1, 1, 2]  # å is two tokens


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{oops", "not JSON"),
        (raw(custom_id=None), "no 'custom_id'"),
        (raw(custom_id=[1]), "'custom_id' must be text"),
        (raw(method="GET"), "'method' is 'GET', must be 'POST'"),
        (raw("/v1/embeddings"), "'url' is '/v1/embeddings', must be /v1/chat/completions or /v1/completions"),
        (raw(["/v1/completions"]), "'url' is"),
    ],
)
def test_a_line_that_is_no_request_has_an_error_and_no_response(
    row_format: OpenAIBatchFormat, text: bytes, message: str
) -> None:
    line = refusal(row_format, text)
    assert line["response"] is None
    assert line["error"]["code"] == "invalid_request"
    assert message in line["error"]["message"]
    assert line["custom_id"] == ("row-1" if b'"custom_id": "row-1"' in text else None)


@pytest.mark.parametrize(
    ("text", "param", "message"),
    [
        (raw(stream=True), "stream", "a batch file cannot stream"),
        (raw(COMPLETIONS, prompt=["a", "b"]), "prompt", "the number of prompts is 2"),
        (raw(temprature=1), "temprature", "unknown parameter 'temprature'"),
        (raw(messages=[{"role": "user", "content": 5}]), "messages", "messages.0.content"),
        (raw(tools=[{"type": "function"}]), "tools", "tools.0.function is missing"),
        (raw(messages=[{"role": "user", "content": "\ud800"}]), "messages", "messages.0.content holds \\ud800"),
        (raw(max_tokens=500, min_tokens=129), "min_tokens", "min_tokens is 129"),
        (raw(n=65), "n", "n is 65"),
        (raw(model=5), "model", "model must be text"),
        (
            json.dumps({"custom_id": "row-1", "method": "POST", "url": CHAT, "body": []}).encode(),
            None,
            "the body must be an object",
        ),
    ],
)
def test_a_body_that_the_endpoint_refuses_is_answered_as_it_does(
    row_format: OpenAIBatchFormat, text: bytes, param: str | None, message: str
) -> None:
    line = refusal(row_format, text)
    assert (line["error"], line["custom_id"], line["response"]["status_code"]) == (None, "row-1", 400)
    error = line["response"]["body"]["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("wrong", [1, {}], ids=str)
@pytest.mark.parametrize("field", ["content", "stop", "messages", "logit_bias", "prompt"])
def test_a_row_of_a_megabyte_of_wrong_items_is_refused_for_the_first(
    row_format: OpenAIBatchFormat, field: str, wrong: Any
) -> None:
    items = [wrong] * (2**20 // len(json.dumps(wrong)))
    url, body = CHAT, {"messages": [{"role": "user", "content": "a"}], field: items}
    if field == "content":
        body = {"messages": [{"role": "user", "content": items}]}
    elif field == "prompt":
        url, body = COMPLETIONS, {"prompt": [*items, "a"]}
    with pytest.raises(RequestError) as refused:  # by the square of their number, as it was, it would take an hour
        row_format.parse("a", raw(url, **body))
    assert len(str(refused.value)) < 300


def test_a_prompt_without_room_for_an_answer_is_told_by_openais_code(row_format: OpenAIBatchFormat) -> None:
    line = refusal(row_format, raw(COMPLETIONS, prompt="x" * 128))
    assert line["response"]["body"]["error"]["code"] == "context_length_exceeded"
    late = row_format.error_record(row_id_of(raw()), raw(), PromptTooLongError("too long"))
    assert late["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("error", [StepError("it tastes bad"), ReplicaLostError("it died")])
def test_what_failed_while_it_ran_has_an_error_that_says_why(row_format: OpenAIBatchFormat, error: Exception) -> None:
    line = row_format.error_record(row_id_of(raw()), raw(), error)
    assert (line["custom_id"], line["response"]) == ("row-1", None)
    assert line["error"] == {"code": "processing_failed", "message": str(error)}


names = st.sampled_from(["prompt", "messages", "max_tokens", "stop", "n", "logit_bias", "logprobs", "tools", "mode"])


@given(st.sampled_from([CHAT, COMPLETIONS]), st.dictionaries(names, json_values, max_size=2), json_values)
def test_whatever_comes_in_an_answer_or_an_error_comes_out(
    row_format: OpenAIBatchFormat, checkpoint: Checkpoint, url: str, body: dict[str, Any], custom_id: object
) -> None:
    text = raw(url, custom_id=custom_id, **body)
    try:
        [line] = row_format.output_records(row_format.parse("row-1", text), [answer_of(checkpoint, "so")])
    except (BadRecordError, RequestError) as error:
        line = row_format.error_record(row_id_of(text), text, error)
        assert (line["response"] is None) != (line["error"] is None)
    json.dumps(line, ensure_ascii=False).encode()


def test_a_batch_file_is_known_by_its_first_line_even_if_that_lacks_something() -> None:
    whole = json.loads(raw())
    assert is_openai_batch(raw())
    for name in whole:
        assert is_openai_batch(json.dumps({key: value for key, value in whole.items() if key != name}).encode())
    assert not any(map(is_openai_batch, (b"{oops", b"[]", b'{"url": "http://x", "body": "page", "prompt": "sum up"}')))


def test_a_row_with_tools_gets_its_calls(checkpoint: Checkpoint) -> None:
    tokenizer = deepcopy(checkpoint.tokenizer)
    tokenizer.chat_template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"
    row_format = OpenAIBatchFormat(SETTINGS, tokenizer, 512, clock=lambda: 0.0)
    tools = [{"type": "function", "function": {"name": "now"}}]
    row = row_format.parse("row-1", raw(tools=tools, tool_choice="required"))
    assert row.request.sampling.grammar and row.request.sampling.grammar.kind == "lark"
    answer = answer_of(checkpoint, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    [line] = row_format.output_records(row, [answer])
    [choice] = line["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}

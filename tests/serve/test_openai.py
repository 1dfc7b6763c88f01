"""The `openai` client against a real endpoint: it is told what OpenAI's API promises."""

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.serve.endpoint_clients import MODEL, http
from tests.serve.endpoint_samples import ANSWER, MESSAGES, Served

FIXED: dict[str, Any] = {"threshold": 0.5, "block": 6}
"""What decides where drafts are cut, and so the output; without them the engine may choose by load."""

CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "seed": 1, "extra_body": FIXED}
VAGUE: dict[str, Any] = CHAT | {
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 1.5,
    "max_tokens": 12,
    "extra_body": {"mode": "ar"},
}
"""A prompt the model is not sure of, so that samples differ."""


@pytest.fixture(scope="module")
def prompt(endpoint: Served) -> list[int]:
    """The conversation as the model sees it."""
    with http(endpoint) as plain:
        tokens: list[int] = plain.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    return tokens


def chat_text(client: OpenAI, **fields: Any) -> str:
    return client.chat.completions.create(**CHAT | fields).choices[0].message.content or ""


def streamed_chat(client: OpenAI, **fields: Any) -> str:
    stream = client.chat.completions.create(**CHAT | fields, stream=True)
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


def test_a_conversation_is_answered_and_a_stream_says_the_same(client: OpenAI) -> None:
    assert chat_text(client) == streamed_chat(client) == ANSWER


def test_a_prompt_is_continued_and_a_stream_says_the_same(client: OpenAI, prompt: list[int]) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 64, "extra_body": FIXED}
    whole = client.completions.create(**fields)
    stream = list(client.completions.create(**fields, stream=True))
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in stream) == ANSWER
    assert whole.choices[0].finish_reason == stream[-1].choices[0].finish_reason == "stop"
    assert {chunk.id for chunk in stream} == {stream[0].id}


def test_the_async_client_is_told_the_same(endpoint: Served) -> None:
    async def ask() -> tuple[str | None, str]:
        async with AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(**CHAT)
            stream = await client.chat.completions.create(**CHAT, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(ask()) == (ANSWER, ANSWER)


def test_exact_mode_says_what_one_token_at_a_time_says(client: OpenAI) -> None:
    replies = [client.chat.completions.create(**CHAT | {"extra_body": {"mode": mode}}) for mode in ("ar", "exact")]
    one, exact = replies
    assert one.choices[0].message.content == exact.choices[0].message.content
    assert one.usage and exact.usage
    assert one.usage.completion_tokens == exact.usage.completion_tokens
    assert one.usage.model_extra and exact.usage.model_extra
    # The two are equal where a busy machine is faster without drafts.
    assert one.usage.model_extra["tokens_per_forward"] == 1.0 <= exact.usage.model_extra["tokens_per_forward"]


def test_each_of_n_answers_is_that_of_the_next_seed(client: OpenAI) -> None:
    several = client.chat.completions.create(**VAGUE | {"n": 3, "seed": 5})
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    alone = [chat_text(client, **VAGUE | {"seed": 5 + number}) for number in range(3)]
    assert [choice.message.content for choice in several.choices] == alone
    assert len(set(alone)) == 3
    assert several.usage and several.usage.completion_tokens <= 36


def test_n_streamed_answers_are_told_apart_by_their_index(client: OpenAI) -> None:
    fields = VAGUE | {"n": 3, "seed": 5}
    whole = client.chat.completions.create(**fields)
    texts, reasons = {0: "", 1: "", 2: ""}, {}
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing follows the reason"
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_seed_repeats_a_sample_and_another_seed_does_not(client: OpenAI) -> None:
    first, again, other = (chat_text(client, **VAGUE | {"temperature": 1, "seed": seed}) for seed in (-3, -3, 4))
    assert first == again != other


@pytest.mark.parametrize("stop", ['", "', [" 34", '", "', "never"]])
def test_the_text_ends_before_a_stop_string_and_nothing_follows(client: OpenAI, stop: str | list[str]) -> None:
    fields: dict[str, Any] = {"stop": stop, "logprobs": True}
    reply = client.chat.completions.create(**CHAT | fields)
    choice = reply.choices[0]
    assert choice.message.content == streamed_chat(client, **fields) == '{"name": "Oscar'
    assert choice.finish_reason == "stop"
    assert choice.logprobs and choice.logprobs.content and reply.usage
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert reply.usage.completion_tokens > len(choice.logprobs.content), "what was cut off was generated all the same"


def spelt(logprobs: Any) -> bytes:
    return b"".join(bytes(entry.bytes) for entry in logprobs.content)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 6},
        {"stop": ["city", "34, "]},
        {"stop": '"}'},
        {"stop": "Oscar", "extra_body": {"mode": "ar"}},
        {"max_tokens": 24, "extra_body": {"ignore_eos": True, "mode": "exact"}},
        {"n": 2, "temperature": 2, "seed": 5, "max_tokens": 40, "extra_body": {"ignore_eos": True, "threshold": 0.3}},
        {"stop": "\u2019", "temperature": 2, "seed": 1, "max_tokens": 40},
    ],
)
@pytest.mark.parametrize("by_token", [False, True])
def test_the_log_probabilities_are_those_of_the_text(client: OpenAI, fields: dict[str, Any], by_token: bool) -> None:
    asked = CHAT | {"logprobs": True} | fields
    whole = client.chat.completions.create(**asked)
    contents, spelled = ["", ""], [b"", b""]  # a character may be spelled by tokens of several chunks
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"single_tokens": by_token}):
        for choice in chunk.choices:
            contents[choice.index] += choice.delta.content or ""
            spelled[choice.index] += spelt(choice.logprobs) if choice.logprobs else b""
    for choice in whole.choices:
        assert choice.logprobs
        assert spelt(choice.logprobs) == spelled[choice.index]
        assert choice.message.content == contents[choice.index] == spelled[choice.index].decode(errors="replace")


@pytest.mark.parametrize("stop", [None, '"age', "age", ["city", "34, "]])
def test_the_log_probabilities_of_a_completion_are_those_of_the_text(
    client: OpenAI, prompt: list[int], stop: Any
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 64, "logprobs": 1}
    whole = client.completions.create(**asked, stop=stop).choices[0]
    assert whole.logprobs and whole.logprobs.tokens
    assert "".join(whole.logprobs.tokens).startswith(whole.text)
    assert whole.text.startswith("".join(whole.logprobs.tokens[:-1])), "a stop string may begin within the last token"
    tokens, text = list[str](), ""
    for chunk in client.completions.create(**asked, stop=stop, stream=True):
        text += chunk.choices[0].text
        tokens += (chunk.choices[0].logprobs.tokens or []) if chunk.choices[0].logprobs else []
        assert text.startswith("".join(tokens[:-1])), "none comes before its text"
    assert tokens == whole.logprobs.tokens


def test_chat_logprobs_spell_the_text_and_list_the_most_likely(client: OpenAI) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 8}
    whole = client.chat.completions.create(**CHAT | fields).choices[0]
    assert whole.logprobs and whole.logprobs.content
    spelled = b"".join(bytes(entry.bytes or ()) for entry in whole.logprobs.content)
    assert spelled.decode() == whole.message.content
    for entry in whole.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the most likely"
    chunks = client.chat.completions.create(**CHAT | fields, stream=True)
    pieces = [choice.logprobs.content or [] for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [entry.token for piece in pieces for entry in piece] == [each.token for each in whole.logprobs.content]


def test_chat_logprobs_name_the_forward_of_each_token_and_what_one_at_a_time_would_have_said(client: OpenAI) -> None:
    fields = CHAT | {"logprobs": True, "extra_body": {"threshold": 0.3, "block": 4}}
    whole = client.chat.completions.create(**fields).choices[0].logprobs
    assert whole and whole.content and whole.model_extra
    forwards = [entry.model_extra["forward"] for entry in whole.content if entry.model_extra]
    assert forwards[0] == 1 and sorted(forwards) == forwards and forwards[-1] < len(forwards)
    at_masks = {number for number in range(1, len(forwards)) if forwards[number] == forwards[number - 1]}
    assert {audit["index"] for audit in whole.model_extra["audits"]} <= at_masks
    chunks = [
        choice.logprobs for each in client.chat.completions.create(**fields, stream=True) for choice in each.choices
    ]
    streamed = [audit for each in chunks if each and each.model_extra for audit in each.model_extra["audits"]]
    assert streamed == whole.model_extra["audits"] != []


def test_completion_logprobs_have_an_offset_into_the_text_for_each_token(client: OpenAI, prompt: list[int]) -> None:
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "logprobs": 2, "temperature": 0, "extra_body": FIXED}
    whole = client.completions.create(model=MODEL, **fields).choices[0]
    logprobs = whole.logprobs
    assert logprobs and logprobs.tokens and logprobs.text_offset and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == whole.text
    for token, offset, top in zip(logprobs.tokens, logprobs.text_offset, logprobs.top_logprobs, strict=True):
        assert whole.text[offset:].startswith(token)
        assert token in top
        assert len(top) == 2
    stream = client.completions.create(model=MODEL, **fields, stream=True)
    streamed = [chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs]
    assert [offset for each in streamed for offset in each.text_offset or ()] == logprobs.text_offset


def test_a_token_with_a_bias_of_minus_100_never_comes(client: OpenAI, endpoint: Served) -> None:
    with http(endpoint) as plain:
        banned = plain.post("/tokenize", json={"prompt": ANSWER}).json()["tokens"]
    reply = client.chat.completions.create(
        **CHAT | {"logit_bias": {str(banned[0]): -100}, "logprobs": True, "max_tokens": 12}
    )
    assert reply.choices[0].logprobs and reply.choices[0].logprobs.content
    assert '{"' not in [entry.token for entry in reply.choices[0].logprobs.content]


def test_penalties_turn_an_answer_away_from_what_it_said(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "temperature": 0, "max_tokens": 12}
    extra = {"mode": "ar", "ignore_eos": True}
    plain = client.completions.create(**fields, extra_body=extra).choices[0].text
    penalised = client.completions.create(**fields, presence_penalty=2, frequency_penalty=2, extra_body=extra)
    repeated = client.completions.create(**fields, extra_body=extra | {"repetition_penalty": 5})
    assert plain not in (penalised.choices[0].text, repeated.choices[0].text)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_cut_short_says_so(client: OpenAI, name: str) -> None:
    reply = client.chat.completions.create(**CHAT | {name: 3})
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage and reply.usage.completion_tokens == 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 3


def test_a_completion_that_names_no_length_has_16_tokens(client: OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="Hello", extra_body={"ignore_eos": True})
    assert reply.usage and reply.usage.completion_tokens == 16


def test_a_developer_is_a_system_and_parts_of_text_are_one_text(endpoint: Served) -> None:
    def spoken(role: str, content: object) -> object:
        return [{"role": role, "content": content}, *MESSAGES]

    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    with http(endpoint) as plain:
        asked = [spoken("system", "Be brief."), spoken("developer", "Be brief."), spoken("system", parts)]
        first, *others = [plain.post("/tokenize", json={"messages": each}).json()["tokens"] for each in asked]
    assert all(each == first for each in others)


def test_roles_and_parts_reach_the_answer(client: OpenAI) -> None:
    parts = [
        {"type": "text", "text": MESSAGES[0]["content"][:20]},
        {"type": "text", "text": MESSAGES[0]["content"][20:]},
    ]
    assert chat_text(client, messages=[{"role": "user", "content": parts}]) == ANSWER


def test_prompts_may_be_text_or_ids_one_or_many(client: OpenAI, endpoint: Served) -> None:
    with http(endpoint) as plain:
        texts = ["Hello", '{"name": "Oscar", '[:-1]]
        ids = [plain.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]

    def said(prompt: object) -> list[str]:
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "extra_body": {"mode": "ar"}}
        reply = client.completions.create(model=MODEL, prompt=prompt, **fields)  # type: ignore[arg-type]
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        return [choice.text for choice in reply.choices]

    first, second = said(texts[0]), said(texts[1])
    assert said(ids[0]) == first
    assert said(texts) == said(ids) == first + second


def test_usage_ends_a_stream_that_asked_for_it_and_no_other(client: OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in client.chat.completions.create(**CHAT, stream=True))


def test_usage_comes_with_every_chunk_for_who_asks_for_that(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    used = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(used) == len(chunks)
    assert used == sorted(used)
    assert 0 < used[0] < used[-1] == used[-2]
    # The forwards of an answer are known at its end.
    assert [hasattr(chunk.usage, "tokens_per_forward") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_single_tokens_come_one_to_a_chunk_and_say_the_same(client: OpenAI, prompt: list[int]) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 64, "extra_body": FIXED}
    by_step = list(client.completions.create(**fields, stream=True))
    options: Any = {"single_tokens": True, "include_usage": True}
    *by_token, closing = client.completions.create(**fields, stream=True, stream_options=options)
    assert closing.usage
    assert len(by_token) == closing.usage.completion_tokens > len(by_step)
    assert "".join(each.choices[0].text for each in by_token) == ANSWER
    assert [each.choices[0].finish_reason for each in by_token if each.choices[0].finish_reason] == ["stop"]


@pytest.mark.parametrize(
    ("asked", "low", "header", "several"),
    [
        ({"threshold": 0.5, "block": 8}, 0.5, "0.5", True),
        ({"threshold": 1.0}, 1.0, "1", None),
        ({"threshold_floor": 0.99}, 1.0, "1", None),
        ({"threshold_floor": 0.5}, 1.0, "1", None),
        ({"threshold": 0.5, "block": 1}, 0.5, "0.5", False),
        ({"threshold": 0.5, "mode": "ar"}, 1.0, "1", False),
    ],
)
def test_a_request_says_how_far_to_look_ahead_and_is_told_what_was_done(
    client: OpenAI, asked: dict[str, Any], low: float, header: str, several: bool | None
) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT | {"extra_body": asked})
    usage = raw.parse().usage
    assert usage and usage.model_extra
    assert usage.model_extra["threshold_low"] == usage.model_extra["threshold_high"] == low
    assert raw.headers["x-mars-threshold"] == header
    if several is not None:
        assert (usage.model_extra["tokens_per_forward"] > 1) == several


def test_the_callers_request_id_comes_back_and_names_the_answer(client: OpenAI) -> None:
    reply = client.chat.completions.create(**CHAT | {"max_tokens": 1}, extra_headers={"x-request-id": "mine-1"})
    assert reply._request_id == "mine-1"
    assert reply.id == "chatcmpl-mine-1"


def test_the_model_is_listed_and_found_by_its_name_alone(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == MODEL == client.models.retrieve(MODEL).id
    assert model.model_extra and model.model_extra["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-5")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_conversation_beyond_the_context_is_a_bad_request_that_says_so(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat_text(client, messages=[{"role": "user", "content": "x " * 4000}])
    assert (refused.value.param, refused.value.code) == (None, "context_length_exceeded")


def test_texts_and_ids_turn_into_each_other(endpoint: Served) -> None:
    with http(endpoint) as plain:
        text = "Ünïcode 漢字, two\nlines"
        reply = plain.post("/tokenize", json={"model": MODEL, "prompt": text}).json()
        assert reply["count"] == len(reply["tokens"]) > 0
        assert reply["max_model_len"] == 2048
        assert plain.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": text}

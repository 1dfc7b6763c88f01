"""The `openai` client asks for the prompt and its log-probabilities, and for the best of several answers."""

from typing import Any

import openai
import pytest
from openai import BadRequestError, OpenAI

from tests.serve.endpoint_clients import MODEL
from tests.serve.endpoint_samples import MESSAGES

TEXT = "Der Bär sagt „grüß Gott“ to 3 friends."
FIELDS: dict[str, Any] = {
    "model": MODEL,
    "prompt": TEXT,
    "temperature": 0,
    "max_tokens": 5,
    "extra_body": {"mode": "ar"},
}


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(**FIELDS | fields)


def test_an_echo_begins_with_the_prompt_in_a_stream_too(client: OpenAI) -> None:
    answer = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == TEXT + answer
    chunks = list(complete(client, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT + answer


def test_an_echo_of_ids_that_are_no_tokens_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="-1000000"):
        complete(client, prompt=[-1_000_000], echo=True)


def test_echoed_log_probabilities_lie_at_the_places_of_their_tokens(client: OpenAI) -> None:
    choice = complete(client, echo=True, logprobs=2).choices[0]
    scores = choice.logprobs
    ends = [*scores.text_offset[1:], len(choice.text)]
    for token, start, end in zip(scores.tokens, scores.text_offset, ends, strict=True):
        assert "\N{REPLACEMENT CHARACTER}" in token or choice.text[start:end] == token or token == "<|end|>"
    assert scores.token_logprobs[0] is scores.top_logprobs[0] is None
    for token, logprob, top in zip(scores.tokens[1:], scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True):
        assert top[token] == logprob <= max(top.values()) <= 0
        assert len(top) in (1, 2, 3)


def test_the_prompt_is_scored_as_an_answer_of_the_same_tokens_is(client: OpenAI) -> None:
    whole = complete(client, echo=True, logprobs=0).choices[0]
    scored = complete(client, prompt=whole.text, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert scored.text == whole.text
    if scored.logprobs.tokens == whole.logprobs.tokens:  # the answer may be cut into other tokens
        assert scored.logprobs.token_logprobs[1:] == pytest.approx(whole.logprobs.token_logprobs[1:], abs=1e-3)


def test_prompts_are_scored_without_an_answer(client: OpenAI) -> None:
    response = complete(client, prompt=[[5, 6, 7], [8, 9]], echo=True, logprobs=0, max_tokens=0)
    assert [len(choice.logprobs.tokens) for choice in response.choices] == [3, 2]
    assert [choice.finish_reason for choice in response.choices] == ["length", "length"]
    assert response.usage.completion_tokens == 0


def test_vllms_field_lists_the_likeliest_tokens_by_id(client: OpenAI) -> None:
    extra = {"mode": "ar", "prompt_logprobs": 2}
    [choice] = complete(client, prompt=[20, 21, 22], extra_body=extra).choices
    nothing, *entries = choice.prompt_logprobs
    assert nothing is None
    for token, entry in zip(("21", "22"), entries, strict=True):
        assert entry[token]["logprob"] <= max(each["logprob"] for each in entry.values())
        assert {each["rank"] for each in entry.values()} >= {1, 2}
        assert len(entry) in (2, 3)
    fields: Any = {"messages": MESSAGES, "max_tokens": 1, "extra_body": extra}
    chat: Any = client.chat.completions.create(model=MODEL, **fields)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_every_answer_to_a_prompt_begins_with_its_scores(client: OpenAI) -> None:
    response = complete(client, prompt=["One.", "Two, three."], n=2, temperature=1, echo=True, logprobs=0)
    one, other, two, last = (choice.logprobs.token_logprobs for choice in response.choices)
    assert [choice.text.partition(".")[0] for choice in response.choices] == ["One", "One", "Two, three", "Two, three"]
    assert one[:2] == other[:2]
    assert two[:3] == last[:3]


def test_the_best_of_several_answers_are_returned(client: OpenAI) -> None:
    fields = {"temperature": 1.5, "seed": 3, "max_tokens": 8, "extra_body": {"mode": "ar", "min_tokens": 8}}
    every = complete(client, **fields, n=6, logprobs=0)
    means = sorted(
        (sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs), choice.text)
        for choice in every.choices
    )
    best = complete(client, **fields, n=2, best_of=6)
    assert [choice.text for choice in best.choices] == [text for _, text in means[:-3:-1]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage.completion_tokens == every.usage.completion_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"suffix": "end", "prompt": [5]}, "suffix"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **fields)
    assert refused.value.param == param

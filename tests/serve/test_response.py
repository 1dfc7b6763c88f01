"""However an answer is cut, its pieces join to the whole: text, tokens, log-probabilities and the reason last."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.chat_completion import ChatCompletion
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk
from openai.types.completion import Completion
from openai.types.completion_usage import CompletionUsage

from mars_ray.engine.chunk import Chunk, Finished, TokenLogprobs
from mars_ray.engine.process.collector import joined_chunk
from mars_ray.openai_api.choices import finish_reason_of, split_by_token
from mars_ray.openai_api.prompt_scores import LEAST_LOGPROB
from mars_ray.openai_api.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
    ResponseMetadata,
)
from mars_ray.openai_api.usage import ResponseUsage

USAGE = CompletionUsage(prompt_tokens=3, completion_tokens=2, total_tokens=5)
BYTES = (b"a", b"bc", " 漢".encode(), "é".encode()[:1], "é".encode()[1:], b"<|end|>")
"""Two of the tokens are halves of a character."""
SILENT = 5
"""The last of them, a special token, of which no text comes."""

METADATA = ResponseMetadata(id="id-1", created=7, model="m", token_bytes=BYTES)


def part_of(
    choice: int,
    pieces: tuple[str, ...],
    tokens: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...] = (),
    reason: Any = None,
) -> Chunk:
    finished = Finished(reason, prompt_tokens=1, cached_tokens=0, tokens=1, forwards=1, queued_s=0) if reason else None
    return Chunk("r", choice, tokens, pieces, logprobs, finished=finished)


@st.composite
def answers(draw: st.DrawFn, choice: int = 0) -> list[Chunk]:
    """One answer as the engine may give it: in steps, its text behind its tokens or not, with logprobs or not, cut
    short by a stop string or not."""
    with_logprobs, parts = draw(st.booleans()), []
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    settled, said = "", 0
    for number, count in enumerate(counts):
        tokens = tuple(draw(st.integers(0, len(BYTES) - 1)) for _ in range(count))
        last, pieces, entries = number + 1 == len(counts), list[str](), list[TokenLogprobs]()
        for token in tokens:
            start = None if token == SILENT else len(settled)
            entries.append(TokenLogprobs(-float(token), ((token, -float(token)),), start))
            settled += BYTES[token].decode(errors="ignore") if token != SILENT else ""
            until = max(said, len(settled) - draw(st.integers(0, 3)))
            pieces.append(settled[said:until])
            said = until
        if last and draw(st.booleans()):
            pieces.append(settled[said:])
        reason = draw(st.sampled_from(["stop", "length"])) if last else None
        given = tuple(entries) if with_logprobs else ()
        parts.append(part_of(choice, tuple(pieces), tokens, given, reason))  # type: ignore[arg-type]
    return parts


def expected(parts: list[Chunk]) -> list[tuple[int, int]]:
    """Tokens that have text in the answer, and where it begins."""
    whole = joined_chunk(parts)
    pairs = zip(whole.tokens, whole.logprobs, strict=False)
    return [(token, each.start) for token, each in pairs if each.start is not None and each.start < len(whole.text)]


def events(builder: ResponseBuilder, parts: Sequence[Chunk]) -> list[dict[str, Any]]:
    """The objects of a stream, as a client parses them."""
    spoken = [each.model_dump_json(exclude_unset=True) for part in parts for each in builder.chunks(part)]
    return [json.loads(each) for each in spoken]


@given(answers())
def test_cutting_by_token_loses_nothing_and_keeps_the_reason_last(parts: list[Chunk]) -> None:
    pieces = [piece for part in parts for piece in split_by_token(part)]
    assert joined_chunk(pieces).text == joined_chunk(parts).text
    assert joined_chunk(pieces).tokens == joined_chunk(parts).tokens
    assert joined_chunk(pieces).logprobs == joined_chunk(parts).logprobs
    assert all(len(piece.tokens) <= 1 for piece in pieces)
    assert [piece.finished for piece in pieces] == [None] * (len(pieces) - 1) + [parts[-1].finished]


@given(answers(), st.booleans())
def test_a_chat_stream_joins_to_the_whole_answer(parts: list[Chunk], by_token: bool) -> None:
    whole = ChatResponseBuilder(METADATA).full([joined_chunk(parts)], USAGE).choices[0]
    cut = [piece for part in parts for piece in split_by_token(part)] if by_token else parts
    choices = [event["choices"][0] for event in events(ChatResponseBuilder(METADATA), cut)]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}, "first whose turn it is"
    assert choices[-1] == {"index": 0, "delta": {}, "finish_reason": whole.finish_reason}, "last the reason, alone"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole.message.content
    spelled = [entry for choice in choices for entry in (choice.get("logprobs") or {"content": []})["content"]]
    assert spelled == [entry.model_dump() for entry in (whole.logprobs.content or [] if whole.logprobs else [])]
    assert [each["token"] for each in spelled] == [METADATA.text_of(token) for token, _ in expected(parts)]


@given(answers(), st.booleans())
def test_a_completion_stream_joins_to_the_whole_answer(parts: list[Chunk], by_token: bool) -> None:
    whole = CompletionResponseBuilder(METADATA).full([joined_chunk(parts)], USAGE).choices[0]
    cut = [piece for part in parts for piece in split_by_token(part)] if by_token else parts
    choices = [event["choices"][0] for event in events(CompletionResponseBuilder(METADATA), cut)]
    assert "".join(choice["text"] for choice in choices) == whole.text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [whole.finish_reason]
    if whole.logprobs:
        assert whole.logprobs.text_offset == [start for _, start in expected(parts)]
    said = 0
    for choice in choices:
        said += len(choice["text"])
        assert all(start < said for start in (choice["logprobs"] or {"text_offset": []})["text_offset"])
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [entry for choice in choices for entry in (choice["logprobs"] or {name: []})[name]]
        assert streamed == (getattr(whole.logprobs, name) if whole.logprobs else [])


@given(st.permutations([(0, part) for part in range(3)] + [(1, part) for part in range(3)]))
def test_answers_that_come_interleaved_are_each_announced_and_ended_once(order: list[tuple[int, int]]) -> None:
    arriving = {
        choice: iter([part_of(choice, (f"{choice}{n}",), (0,), (), "stop" if n == 2 else None) for n in range(3)])
        for choice in (0, 1)
    }
    spoken = events(ChatResponseBuilder(METADATA), [next(arriving[choice]) for choice, _ in order])
    for choice in (0, 1):
        mine = [event["choices"][0] for event in spoken if event["choices"][0]["index"] == choice]
        assert ["role" in each["delta"] for each in mine] == [True, *[False] * 4]
        assert "".join(each["delta"].get("content", "") for each in mine) == f"{choice}0{choice}1{choice}2"
        assert [each["finish_reason"] for each in mine] == [None] * 4 + ["stop"]


@given(answers(), answers(choice=1))
def test_what_is_sent_is_what_the_openai_package_reads(first: list[Chunk], second: list[Chunk]) -> None:
    parts = [joined_chunk(first), joined_chunk(second)]
    for builder, whole, piece in (
        (ChatResponseBuilder, ChatCompletion, ChatCompletionChunk),
        (CompletionResponseBuilder, Completion, None),
    ):
        text = builder(METADATA).full(parts, USAGE).model_dump_json(exclude_unset=True)
        read = whole.model_validate_json(text)
        assert [choice.index for choice in read.choices] == [0, 1]
        assert read.usage == USAGE
        if piece:
            assert all(
                piece.model_validate(event).id == "id-1" for event in events(ChatResponseBuilder(METADATA), first)
            )


def test_a_chat_answer_looks_as_openai_writes_it() -> None:
    part = part_of(0, ("a", "bc"), (0, 1), (), "stop")
    assert json.loads(ChatResponseBuilder(METADATA).full([part], USAGE).model_dump_json(exclude_unset=True)) == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abc", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


@pytest.mark.parametrize("builder", [ChatResponseBuilder(METADATA), CompletionResponseBuilder(METADATA)])
def test_usage_comes_with_no_choice(builder: ResponseBuilder) -> None:
    [last] = builder.last_chunks(USAGE)
    closing = json.loads(last.model_dump_json(exclude_unset=True))
    assert closing["choices"] == []
    assert closing["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_logprob_json_cannot_say_is_openais_least(value: float) -> None:
    part = part_of(0, ("a",), (0,), (TokenLogprobs(value, ((1, value),), 0),), "stop")
    [entry] = ChatResponseBuilder(METADATA).full([part], USAGE).choices[0].logprobs.content  # type: ignore[misc, union-attr]
    assert (entry.logprob, entry.top_logprobs[0].logprob) == (LEAST_LOGPROB, LEAST_LOGPROB)


def test_an_id_the_tokenizer_does_not_use_has_no_bytes() -> None:
    assert (METADATA.bytes_of(99), METADATA.text_of(99), METADATA.text_of(3)) == (b"", "", "�")


@pytest.mark.parametrize(("ended", "told"), [("stop", "stop"), ("length", "length"), ("cancelled", "length")])
def test_the_last_chunk_of_a_sequence_gives_the_reason(ended: Any, told: str) -> None:
    assert finish_reason_of(part_of(0, ("a",), (5,), reason=ended)) == told
    assert finish_reason_of(part_of(0, ("a",), (5,))) is None


def test_usage_sums_sequences_and_counts_a_prompt_once() -> None:
    response = ResponseUsage(prompt_tokens=7)
    for index in (0, 1):
        response.add(Chunk("r", index, (1, 2), ("a", "b"), threshold=0.9))
        finished = Finished("stop", prompt_tokens=7, cached_tokens=4, tokens=3, forwards=2, queued_s=index)
        response.add(Chunk("r", index, (3,), ("c",), threshold=0.8 + index / 10, finished=finished))
    usage = response.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 6, 13)
    assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == 4
    assert usage.model_extra == {"tokens_per_forward": 1.5, "threshold_low": 0.8, "threshold_high": 0.9}
    assert (response.threshold_range, response.queued_s) == ("0.8-0.9", 1)

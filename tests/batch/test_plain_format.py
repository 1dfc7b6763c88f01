"""What is a row, what it may ask for, and what is said about one that is none."""

import copy
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from mars_ray.batch.rows.plain_format import PlainFormat, PlainFormatSettings
from mars_ray.batch.rows.row_ids import RowId
from mars_ray.batch.rows.template import CHARACTERS_MAX
from mars_ray.chat.unicode_text import BYTES
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.chunk import Chunk, Finished, TokenLogprobs
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import BadRecordError, ConfigError, RequestError
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.rows import json_values

USER = {"role": "user", "content": "why?"}
ASSISTANT = {"role": "assistant", "content": "so."}
SETTINGS = PlainFormatSettings(
    sampling=SamplingParams(max_tokens=9, temperature=0.5, stop=("!",), logprobs=1), decode=DecodeParams(floor=0.6)
)
ANSWER = Chunk(
    request_id="",
    index=0,
    pieces=("so",),
    tokens=(5, 6, 7),
    logprobs=(
        TokenLogprobs(-0.5, ((5, -0.5),)),
        TokenLogprobs(-1.0, ()),
        TokenLogprobs(-math.inf, ((7, -math.inf),)),
    ),
    threshold=0.9,
    finished=Finished(reason="stop", prompt_tokens=4, cached_tokens=0, tokens=3, forwards=2, queued_s=0.0),
)

OPTIONS = ("max_tokens", "temperature", "top_p", "seed", "threshold", "mode", "n", "stop")
almost_rows = st.fixed_dictionaries(
    {},
    optional={
        "id": json_values,
        "prompt": json_values | st.just("x"),
        "messages": json_values | st.just([USER]),
        "text": json_values,
        **dict.fromkeys(OPTIONS, json_values | st.integers(0, 2) | st.sampled_from(["ar", 1.0, 1e300])),
    },
)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    return checkpoint.tokenizer


@pytest.fixture(scope="module")
def row_format(tokenizer: PreTrainedTokenizerBase) -> PlainFormat:
    return PlainFormat(SETTINGS, tokenizer)


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_prompt_is_one_message_of_the_user(row_format: PlainFormat, tokenizer: PreTrainedTokenizerBase) -> None:
    row = row_format.parse("a1", raw(id="a1", prompt="why?", source="web"))
    assert (row.id, row.prompt_text) == ("a1", "why?")
    assert row.request.prompt == tuple(ChatEncoder(tokenizer).prompt([USER]))
    assert (row.request.sampling, row.request.decode) == (SETTINGS.sampling, SETTINGS.decode)
    assert row.columns == {"id": "a1", "prompt": "why?", "source": "web"}


def test_of_a_conversation_the_last_question_is_shown(
    row_format: PlainFormat, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "system", "content": "be brief"}, USER, ASSISTANT, USER | {"content": "really?"}]
    row = row_format.parse("7", raw(id=7, messages=messages))
    assert (row.prompt_text, row.request.prompt) == ("really?", tuple(ChatEncoder(tokenizer).prompt(messages)))


def test_a_conversation_may_end_with_what_a_tool_returned(
    row_format: PlainFormat, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [USER, ASSISTANT, {"role": "tool", "content": "42"}]
    row = row_format.parse("a", raw(messages=messages))
    assert (row.prompt_text, row.request.prompt) == ("why?", tuple(ChatEncoder(tokenizer).prompt(messages)))


def test_a_column_that_is_null_is_one_that_is_not_there(row_format: PlainFormat) -> None:
    plain = row_format.parse("a", raw(prompt="why?")).request
    assert row_format.parse("a", raw(messages=None, prompt="why?")).request == plain
    assert row_format.parse("a", raw(messages=[USER], prompt=None)).request == plain
    assert row_format.parse("a", raw(prompt="why?", **dict.fromkeys(OPTIONS))).request == plain


def test_a_column_by_another_name_holds_text_or_a_conversation(tokenizer: PreTrainedTokenizerBase) -> None:
    row_format = PlainFormat(replace(SETTINGS, prompt_column="question"), tokenizer)
    text = row_format.parse("a", raw(question="why?", prompt="other", messages=[ASSISTANT]))
    assert text.prompt_text == "why?"
    assert row_format.parse("a", raw(question=[USER])).request == text.request
    with pytest.raises(BadRecordError, match=r"it has no 'question', only \['prompt'\]"):
        row_format.parse("a", raw(prompt="why?"))


def test_a_trace_says_which_tokens_came_together(tokenizer: PreTrainedTokenizerBase) -> None:
    answer = replace(ANSWER, accepted_lengths=(1, 2))
    for trace, kept in ((True, {"token_ids": [5, 6, 7], "accepted": [1, 2]}), (False, {})):
        row_format = PlainFormat(replace(SETTINGS, trace=trace), tokenizer)
        [record] = row_format.output_records(row_format.parse("a", raw(prompt="why?")), [answer])
        assert {name: record[name] for name in ("token_ids", "accepted") if name in record} == kept


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{oops", "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b"[1]", "not a JSON object"),
        (raw(text="x"), "neither 'prompt' nor 'messages'"),
        (raw(prompt=None), "its 'prompt' is null"),
        (raw(prompt=3), "'prompt' must be text, not int 3"),
        (raw(prompt=" \n"), "prompt is empty"),
        (raw(messages=[USER, ASSISTANT]), "there is nothing to answer"),
        (raw(prompt="x", id=[1]), "'id' must be text or an integer, not list"),
        (raw(prompt="x", id=True), "'id' must be text or an integer, not bool"),
        (b'{"prompt": "\\ud800"}', r"prompt holds \\ud800, which is only half of a surrogate pair"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', r"messages.0.content holds \\ud800"),
        (b'{"prompt": "x", "id": "\\ud800"}', "not valid Unicode"),
        (b'{"prompt": "x", "sampling": {"stop": "\\ud800"}}', r"sampling.stop holds \\ud800"),
    ],
)
def test_a_bad_row_is_refused_with_the_reason(row_format: PlainFormat, text: bytes, reason: str) -> None:
    with pytest.raises((BadRecordError, RequestError), match=reason):
        row_format.parse("a", text)


@pytest.mark.parametrize("depth", [500, 5_000, 100_000])
def test_a_row_nested_without_end_is_refused(row_format: PlainFormat, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    for text in (b'{"prompt": ' + nested + b"}", b'{"messages": [' + nested + b"]}", b'{"id": ' + nested + b"}"):
        with pytest.raises((BadRecordError, RequestError)):
            row_format.parse("a", text)


@given(st.binary() | almost_rows.map(lambda fields: json.dumps(fields).encode()))
def test_whatever_comes_in_a_row_that_can_be_written_or_a_reason_comes_out(
    row_format: PlainFormat, text: bytes
) -> None:
    try:
        row = row_format.parse("a", text)
    except (BadRecordError, RequestError) as error:
        record = row_format.error_record(RowId(key=b"", id="a"), text, error)
        assert record["reason"]
    else:
        [record] = row_format.output_records(row, [ANSWER])
        assert record["text"] == "so"
    json.dumps(record, ensure_ascii=False, allow_nan=False).encode()


def test_a_row_asks_for_options_of_its_own(row_format: PlainFormat) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "top_p": 0.5, "seed": 7, "n": 2, "stop": ["a", "b"]}
    request = row_format.parse("a", raw(prompt="x", threshold=0.8, mode="exact", **asked)).request
    assert request.sampling == replace(SETTINGS.sampling, **(asked | {"stop": ("a", "b")}))
    assert request.decode == DecodeParams(mode=Mode.EXACT, threshold=0.8)
    assert row_format.parse("a", raw(prompt="x", stop="a")).request.sampling.stop == ("a",)


def test_whole_numbers_that_parquet_made_fractions_are_whole(row_format: PlainFormat) -> None:
    sampling = row_format.parse("a", raw(prompt="x", max_tokens=64.0, seed=7.0, n=math.nan)).request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.n) == (64, 7, 1)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": "64"}, "max_tokens is '64'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"n": 65}, "n is 65"),
        ({"n": True}, "n is True"),
        ({"threshold": 2}, "threshold is 2"),
        ({"mode": "fast"}, "mode is 'fast'; choose one of ar, threshold, exact"),
        ({"mode": ["ar"]}, "mode is"),
        ({"stop": 5}, "stop is 5"),
        ({"stop": [5]}, r"stop is \(5,\)"),
    ],
)
def test_options_out_of_range_are_refused_with_the_value(row_format: PlainFormat, asked: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        row_format.parse("a", raw(prompt="x", **asked))


@pytest.mark.parametrize("wrong", [-1, {}], ids=str)
@pytest.mark.parametrize("name", ["stop", "max_tokens", "temperature", "stop_token_ids", "logit_bias", "regex"])
def test_a_row_of_a_megabyte_of_wrong_items_is_refused_in_a_few_words(
    row_format: PlainFormat, name: str, wrong: Any
) -> None:
    items = [wrong] * (2**20 // len(json.dumps(wrong)))
    with pytest.raises(RequestError) as refused:
        row_format.parse("a", raw(prompt="Hello", sampling={name: items}))
    assert len(str(refused.value)) < 300


def test_with_the_seed_of_the_job_each_row_draws_for_itself_and_alike_in_every_run(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    def seed(job_seed: int, id: str, **asked: int) -> int | None:
        settings = replace(SETTINGS, sampling=SamplingParams(seed=job_seed))
        return PlainFormat(settings, tokenizer).parse(id, raw(prompt="x", **asked)).request.sampling.seed

    assert seed(1, "a") == seed(1, "a")
    assert len({seed(1, "a"), seed(1, "a-2"), seed(2, "a")}) == 3
    assert seed(1, "a", seed=7) == 7


def test_a_template_makes_the_prompt_from_columns(tokenizer: PreTrainedTokenizerBase) -> None:
    source = "{{ title | upper }}: {{ row['full text'] }}{% if note %} ({{ note }}){% endif %}\n"
    row_format = PlainFormat(replace(SETTINGS, template=source), tokenizer)
    row = row_format.parse("a", raw(title="a", note=None, prompt="own", **{"full text": "b <c>"}))
    assert row.prompt_text == "A: b <c>"
    assert row.request.prompt == tuple(ChatEncoder(tokenizer).prompt([{"role": "user", "content": "A: b <c>"}]))
    [record] = row_format.output_records(row, [ANSWER])
    assert (record["prompt"], record["input_prompt"]) == ("A: b <c>", "own")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ question }}", r"'question' is undefined. The row's columns are \['empty', 'title'\]"),
        ("{% if question %}x{% endif %}", "'question' is undefined"),
        ("{{ title.missing }}", "no attribute 'missing'"),
        ("{{ empty }}", "null"),
        ("{{ none }}", "null"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include 'x' %}", "cannot be filled"),
        ('{{ "\\ud800" }}', "cannot be filled"),
        ("{% if false %}x{% endif %} ", "prompt is empty"),
        ("{% for _ in range(99999) %}{{ title * 99 }}{% endfor %}", f"more than {CHARACTERS_MAX} characters"),
    ],
)
def test_a_template_that_cannot_be_filled_costs_the_row_and_says_why(
    tokenizer: PreTrainedTokenizerBase, source: str, reason: str
) -> None:
    row_format = PlainFormat(replace(SETTINGS, template=source), tokenizer)
    with pytest.raises(BadRecordError, match=reason):
        row_format.parse("a", raw(title="a", empty=None))


@pytest.mark.parametrize("source", ["line\n{{ title", "line\n{% if title %}", "line\n{{ title | no_such_filter }}"])
def test_a_template_that_is_none_is_refused_at_once_with_the_line(
    tokenizer: PreTrainedTokenizerBase, source: str
) -> None:
    with pytest.raises(ConfigError, match="the template has an error in line 2: "):
        PlainFormat(replace(SETTINGS, template=source), tokenizer)


def test_each_sequence_is_a_record_and_the_own_columns_are_kept(row_format: PlainFormat) -> None:
    row = row_format.parse("7", raw(id=7, prompt="why?", text="mine", messages=None, n=2, extra={"a": [1, None]}))
    first, second = row_format.output_records(row, [ANSWER, replace(ANSWER, pieces=("no",), tokens=(), logprobs=())])
    assert first == {
        "id": "7",
        "sample": 0,
        "prompt": "why?",
        "text": "so",
        "tokens": 3,
        "forwards": 2,
        "tokens_per_forward": 1.5,
        "threshold": 0.9,
        "finish_reason": "stop",
        "logprobs": [
            {"token": 5, "logprob": -0.5, "top": [[5, -0.5]]},
            {"token": 6, "logprob": -1.0, "top": []},
            {"token": 7, "logprob": -9999.0, "top": [[7, -9999.0]]},
        ],
        "input_text": "mine",
        "messages": None,
        "n": 2,
        "extra": {"a": [1, None]},
    }
    assert (second["sample"], second["text"], second["logprobs"]) == (1, "no", [])


def test_columns_that_would_get_one_name_get_two(row_format: PlainFormat) -> None:
    row = row_format.parse("1", raw(id=1, input_id=2, prompt="x", text="y", input_text="z"))
    [record] = row_format.output_records(row, [ANSWER])
    assert (record["id"], record["input_id"]) == ("1", 2)
    assert (record["text"], record["input_text"], record["input_input_text"]) == ("so", "y", "z")


def test_invalid_unicode_fails_only_a_row_whose_template_prints_it(tokenizer: PreTrainedTokenizerBase) -> None:
    row_format = PlainFormat(replace(SETTINGS, template="{{ title }}{{ note or '' }}"), tokenizer)
    fields = {"title": "why?", "image": BYTES + "//4=", "\ud800": {"\udc00": ["\ud800"]}}
    assert row_format.parse("a", raw(note=None, **fields)).columns == {"note": None} | fields
    for note, reason in (("\ud83d", "half of a surrogate pair"), (BYTES + "//4=", "bytes that are not UTF-8 text")):
        with pytest.raises(BadRecordError, match=f"the template cannot be filled: it prints {reason}"):
            row_format.parse("a", raw(note=note, **fields))


def test_a_used_column_with_bytes_is_refused_by_name(row_format: PlainFormat) -> None:
    with pytest.raises(RequestError, match=r"prompt holds bytes that are not UTF-8 text\."):
        row_format.parse("a", raw(prompt=BYTES + "//4="))
    assert row_format.parse("a", raw(prompt=BYTES + "//4=", messages=[USER])).prompt_text == "why?"


def test_sampling_may_be_json_text(row_format: PlainFormat) -> None:
    sampling = {"top_k": 3, "schema": {"type": "object", "default": None}, "logit_bias": {"6": 1.5}}
    as_object = row_format.parse("a", raw(prompt="x", sampling=sampling)).request
    assert row_format.parse("a", raw(prompt="x", sampling=json.dumps(sampling))).request == as_object
    for text, reason in (
        ("{top_k: 3}", "which is not JSON"),
        ("[3]", "must be an object"),
        ('{"k": 3}', "unknown"),
        ('{"stop": "\\ud800"}', "stop holds"),
    ):
        with pytest.raises(RequestError, match=f"sampling.*{reason}"):
            row_format.parse("a", raw(prompt="x", sampling=text))


def test_logprobs_are_there_only_when_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    row_format = PlainFormat(replace(SETTINGS, sampling=SamplingParams()), tokenizer)
    [record] = row_format.output_records(row_format.parse("a", raw(prompt="x")), [ANSWER])
    assert "logprobs" not in record


def test_a_row_that_was_refused_is_written_as_it_came(row_format: PlainFormat) -> None:
    record = row_format.error_record(RowId(key=b"", id="a"), b"{oops \xff", BadRecordError("why"))
    assert record == {"id": "a", "reason": "why", "row": "{oops \ufffd"}


def test_a_conversation_with_its_answer_is_scored_and_not_answered(
    row_format: PlainFormat, tokenizer: PreTrainedTokenizerBase
) -> None:
    fields = {"messages": [USER, ASSISTANT], "sampling": {"prompt_logprobs": 1, "max_tokens": 0, "logprobs": None}}
    row = row_format.parse("a", raw(**fields))
    encoder = ChatEncoder(tokenizer)
    assert row.request.prompt == tuple(encoder.ids(encoder.whole_text([USER, ASSISTANT])))
    scores = tuple(TokenLogprobs(-1.0, ((5, -0.5),), forward=0) for _ in row.request.prompt[1:])
    [record] = row_format.output_records(row, [replace(ANSWER, prompt_logprobs=scores)])
    assert [entry["token"] for entry in record["prompt_logprobs"]] == list(row.request.prompt)
    assert record["prompt_logprobs"][0] == {"token": row.request.prompt[0], "logprob": None, "top": []}
    assert record["prompt_logprobs"][1]["logprob"] == -1.0
    with pytest.raises(BadRecordError, match="nothing to answer"):
        row_format.parse("a", raw(messages=[USER, ASSISTANT]))


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def with_tools(tokenizer: PreTrainedTokenizerBase) -> PlainFormat:
    """The format with a chat template that renders tools."""
    knows_tools = copy.deepcopy(tokenizer)
    knows_tools.chat_template = f"{{{{ tools }}}}<tool_call>{tokenizer.chat_template}"
    return PlainFormat(SETTINGS, knows_tools)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_choice_of_a_tool_without_tools_is_refused(with_tools: PlainFormat, choice: Any) -> None:
    with pytest.raises(RequestError, match="the choice of a tool needs tools"):
        with_tools.parse("a", raw(prompt="why?", tool_choice=choice))


def test_a_row_with_tools_is_held_by_a_grammar_and_its_answer_is_parted(with_tools: PlainFormat) -> None:
    row = with_tools.parse("a", raw(prompt="why?", tools=[TOOL], tool_choice="required"))
    assert row.request.sampling.grammar is not None
    text = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    [record] = with_tools.output_records(row, [replace(ANSWER, pieces=(text,))])
    assert (record["text"], record["tool_calls"]) == ("Well.", [{"name": "add", "arguments": '{"a": 1}'}])
    assert record["prompt"] == "why?"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        ({"tools": [TOOL, TOOL]}, "tools holds 2 functions with the name 'add'"),
        ({"tools": "add"}, "tools must be a list"),
        ({"tools": [TOOL], "sampling": {"regex": "a"}}, "there are tools and a schema"),
        ({"tools": [TOOL], "messages": [ASSISTANT | {"tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls.0"),
    ],
)
def test_a_row_with_unusable_tools_is_refused_by_name(
    with_tools: PlainFormat, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        with_tools.parse("a", raw(prompt="why?", **fields))


def test_a_model_whose_template_renders_no_tools_refuses_them(row_format: PlainFormat) -> None:
    with pytest.raises(RequestError, match="tools"):
        row_format.parse("a", raw(prompt="why?", tools=[TOOL]))

"""`LLM` and `AsyncLLM`: what they return is what the engine gives, in the order of the prompts."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from mars_ray import LLM, AsyncLLM, EngineOptions, SamplingParams
from mars_ray.engine.options import options_by_name
from mars_ray.errors import AdapterError, ConfigError, GrammarError, ModelError, PromptTooLongError, RequestError
from tests.serve.adapter_samples import saved_adapter

LIST = "Diana, Rita, Grace: put them in a numbered list."
JSON = "JSON with the keys name, city: Ada lives in London."
SHORT = SamplingParams(max_tokens=48)


def opened_llm() -> LLM:
    return LLM("bundled", max_num_seqs=4)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with opened_llm() as opened:
        yield opened


@pytest.fixture
def new_llm() -> Iterator[LLM]:
    """An LLM that knows no step times yet. Once it does, a busy machine may be faster without masks."""
    with opened_llm() as opened:
        yield opened


def test_a_chat_is_answered_with_several_tokens_per_forward(new_llm: LLM) -> None:
    [output] = new_llm.chat(LIST, SHORT)
    assert output.text == "1. Diana\n2. Rita\n3. Grace"
    assert output.finish_reason == "stop"
    assert output.tokens_per_forward > 1
    assert new_llm.tokenizer.decode(output.token_ids, skip_special_tokens=True) == output.text


def test_answers_keep_the_order_of_prompts_of_different_lengths(llm: LLM) -> None:
    texts = [LIST, JSON] * 6
    lengths = [48, 3] * 6
    outputs = llm.chat(texts, [SamplingParams(max_tokens=each) for each in lengths])
    alone = {text: llm.chat(text, SHORT)[0].text for text in (LIST, JSON)}
    assert [output.text for output in outputs[::2]] == [alone[LIST]] * 6
    assert all(alone[JSON].startswith(output.text) and len(output.token_ids) <= 3 for output in outputs[1::2])


def test_more_prompts_than_may_wait_are_all_answered() -> None:
    outputs = LLM("bundled", max_num_seqs=4, max_waiting_seqs=2).chat([LIST] * 12, SamplingParams(max_tokens=4))
    assert [len(output.token_ids) for output in outputs] == [4] * 12


def test_an_adapter_that_is_set_decodes_by_its_name_until_another_set_replaces_it(llm: LLM, tmp_path: Path) -> None:
    folder = saved_adapter(tmp_path / "a", 3)
    [plain] = llm.chat(LIST, SHORT)
    llm.set_adapters({"a": folder, "b": folder})
    assert llm.chat(LIST, SHORT, adapter="b", mode="exact")[0].text == plain.text
    with pytest.raises(AdapterError, match=r"adapter 'c': .*missing"):
        llm.set_adapters({"a": folder, "c": str(tmp_path / "missing")})
    assert llm.chat(LIST, SHORT, adapter="a", mode="exact")[0].text == plain.text
    llm.set_adapters({})
    with pytest.raises(RequestError, match="adapter is 'a'; this engine has no adapters with a name"):
        llm.chat(LIST, SHORT, adapter="a")


def test_a_string_is_a_conversation_of_one_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": LIST}]
    [one], [other], [listed] = llm.chat(messages, SHORT), llm.chat(LIST, SHORT), llm.chat([messages], SHORT)
    assert one.prompt_token_ids == other.prompt_token_ids == listed.prompt_token_ids
    assert one.token_ids == other.token_ids == listed.token_ids


def test_a_prompt_is_scored_without_an_answer(llm: LLM) -> None:
    [output] = llm.generate("Names: Ann,", SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) - 1
    assert all(entry.chosen < 0 for entry in output.prompt_logprobs)
    assert (output.text, output.finish_reason) == ("", "length")


def test_token_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer("Names: Ann,")["input_ids"]
    [text], [alone], [listed] = (llm.generate(prompt, SHORT) for prompt in ("Names: Ann,", ids, [ids]))
    assert text.prompt_token_ids == alone.prompt_token_ids == listed.prompt_token_ids
    assert text.token_ids == alone.token_ids == listed.token_ids


def test_the_default_is_lossless_and_takes_fewer_forwards_than_one_token_at_a_time(llm: LLM, new_llm: LLM) -> None:
    [plain] = llm.chat(LIST, SHORT, mode="ar")
    [lossless] = new_llm.chat(LIST, SHORT)
    assert lossless.token_ids == plain.token_ids
    assert plain.tokens_per_forward == 1
    assert lossless.tokens_per_forward > 1


def test_a_threshold_takes_fewer_forwards_than_one_token_at_a_time(new_llm: LLM) -> None:
    [fast] = new_llm.chat(LIST, SHORT, threshold=0.6)
    assert fast.tokens_per_forward > 1


def test_n_answers_to_a_prompt_stand_in_one_output(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=16, n=3, temperature=1.0, seed=1)
    [output] = llm.chat(JSON, sampling)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert output.text == output.outputs[0].text


class Person(BaseModel):
    name: str
    city: str


def test_outputs_have_the_fields_of_vllms(llm: LLM) -> None:
    one, other = llm.chat(["Hello", "Hello"], SamplingParams(max_tokens=2))
    assert one.finished and one.request_id != other.request_id
    assert "Hello" in one.prompt and llm.tokenizer(one.prompt)["input_ids"] == list(one.prompt_token_ids)
    [plain] = llm.generate("1, 2, 3", SamplingParams(max_tokens=2))
    assert plain.prompt == "1, 2, 3"


@pytest.mark.parametrize("schema", [Person, Person.model_json_schema()])
def test_answers_hold_to_a_schema(llm: LLM, schema: type[BaseModel] | dict[str, Any]) -> None:
    [output] = llm.chat(JSON, SamplingParams(max_tokens=64), schema=schema)
    assert output.finish_reason == "stop"
    Person.model_validate_json(output.text)


def test_a_tool_that_must_be_called_is_called(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", f"{{{{ tools }}}}<tool_call>{llm.tokenizer.chat_template}")
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    [output] = llm.chat("Is it warm in Rome?", tools=[tool], tool_choice="required")
    calls = output.outputs[0].tool_calls
    assert calls and {(call.name, call.arguments) for call in calls} == {("weather", '{"city": "Rome"}')}
    assert output.text == ""


def test_one_unusable_prompt_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match="tokens"):
        llm.generate([[5] * 3, [5] * 100_000], SHORT)
    assert not llm.engine.busy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "quick"}, "mode is 'quick'; choose one of ar, threshold, exact"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"sampling_params": [SHORT]}, "2 prompts and 1 sampling parameters"),
        ({"schema": '{"type": 3}'}, "json_schema cannot be used"),
    ],
)
def test_wrong_values_are_named(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat([LIST, JSON], **arguments)  # type: ignore[arg-type]


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ModelError, match="bundlet"):
        LLM("bundlet")


def test_an_async_caller_with_a_costly_schema_hears_so_and_the_next_is_answered() -> None:
    async def answer() -> str:
        async with AsyncLLM("bundled") as other:
            with pytest.raises(GrammarError, match="simplify it"):
                await other.chat(JSON, schema={"type": "integer", "multipleOf": 3_000_017})
            return (await other.chat(JSON, schema={"type": "boolean"})).text

    assert asyncio.run(answer()) in ("true", "false")


def test_async_answers_are_those_of_llm_and_streams_add_up_to_them(llm: LLM) -> None:
    async def answers() -> tuple[str, str, str]:
        async with AsyncLLM("bundled", max_num_seqs=4) as other:
            streamed = "".join([chunk.text async for chunk in other.stream(LIST, SHORT)])
            first, second = await asyncio.gather(other.chat(LIST, SHORT), other.chat(JSON, SHORT))
            return streamed, first.text, second.text

    streamed, first, second = asyncio.run(answers())
    assert streamed == first == llm.chat(LIST, SHORT)[0].text
    assert second == llm.chat(JSON, SHORT)[0].text


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "'quantization' is not an option of the engine. Did you mean 'quantize'?"),
        ({"max_num_seq": 8}, "Did you mean 'max_num_seqs'?"),
        ({"gpus": 8}, "'gpus' is not an option of the engine. The options are engine, max_num_seqs"),
        ({"quantize": "fp8"}, "quantize is 'fp8', must be 'int8' or 'int4'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, must be at least 1"),
        ({"classes": "x"}, "classes.0 is 'x'"),
        ({"dtype": "float16"}, "dtype is 'float16', must be auto, float32 or bfloat16"),
        ({"dtype": None}, "dtype is None, must be"),
    ],
)
def test_an_unknown_option_or_value_is_one_error_that_says_what_to_write(
    kind: type, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        kind("bundled", **options)


def test_every_option_of_the_engine_is_an_argument() -> None:
    values = EngineOptions(quantize="int8", threshold=0.9, max_num_seqs=3)
    by_name = {option.name: getattr(values, option.name) for option in fields(EngineOptions)}
    assert options_by_name(by_name) == values
    with LLM("bundled", quantize="int8", max_num_seqs=3) as llm:
        assert ", int8" in llm.engine.kernels  # type: ignore[attr-defined]
        assert llm.engine.limits.max_num_seqs == 3

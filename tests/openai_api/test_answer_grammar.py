"""Whatever a model writes within the grammar of an answer is a call that its tools accept, and nothing is lost."""

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.chat.call_format import CALL_FORMATS, REASONING_FORMATS, AnswerFormat, ToolParserName
from mars_ray.chat.tools import FunctionDefinition
from mars_ray.engine.grammar.library import compile_grammar
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.errors import GrammarError, RequestError
from mars_ray.openai_api.answer_grammar import ReasoningPlan, answer_grammar
from mars_ray.openai_api.call_parser import CallParser
from mars_ray.openai_api.reasoning_parser import ReasoningParser
from mars_ray.openai_api.tools import OfferedTools
from tests.openai_api.answer_samples import joined
from tests.openai_api.grammar_walks import PARAMETERS, parsed_arguments, vocabulary, walk

THINK = REASONING_FORMATS["deepseek_r1"]
NAMES = ("get_weather", "a-b", "f")


def model_of(name: ToolParserName, *, tokens: bool) -> AnswerFormat:
    """A model that writes calls in a format, with markers that are one token each or spelt."""
    return AnswerFormat(calls=CALL_FORMATS[name], template_takes_tools=True, markers=vocabulary(tokens)[2])


def offered(parameters: list[dict[str, Any] | None], **fields: Any) -> OfferedTools:
    functions = tuple(
        FunctionDefinition(name=name, parameters=schema) for name, schema in zip(NAMES, parameters, strict=False)
    )
    defaults = {"required": True, "parallel": True, "legacy": False}
    return OfferedTools(functions=functions, callable=functions, **defaults | fields)  # type: ignore[arg-type]


def check_calls(text: str, ended: bool, model: AnswerFormat, tools: OfferedTools) -> tuple[str, int]:
    """Assert that all calls are accepted by their tools; return the content and the number of calls."""
    assert model.calls
    parser = CallParser(model.calls, NAMES)
    _, content, calls = joined([*parser.push(text), *parser.finish()])
    schemas = {function.name: function.parameters for function in tools.callable}
    for number, (name, arguments) in enumerate(calls):
        if not ended and number == len(calls) - 1:
            continue  # cut in the middle
        jsonschema.validate(parsed_arguments(arguments), schemas[name] or {"additionalProperties": False})
    return content, len(calls)


def check_walk(name: ToolParserName, tokens: bool, parameters: list[Any], parallel: bool, seed: int) -> None:
    model = model_of(name, tokens=tokens)
    tools = offered(parameters, parallel=parallel)
    text, ended = walk(answer_grammar(model, tools, None, None), Random(seed), markers=tokens)
    content, calls = check_calls(text, ended, model, tools)
    if ended:
        assert content == "", text
        assert calls >= 1 if parallel else calls == 1, text


WALKS = given(
    name=st.sampled_from(list(CALL_FORMATS)),
    tokens=st.booleans(),
    parameters=st.lists(PARAMETERS, min_size=1, max_size=3),
    parallel=st.booleans(),
    seed=st.integers(0, 2**32),
)


@WALKS
def test_a_required_call_is_accepted_by_its_tool(
    name: ToolParserName, tokens: bool, parameters: list[Any], parallel: bool, seed: int
) -> None:
    check_walk(name, tokens, parameters, parallel, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@WALKS
@settings(max_examples=10_000)
def test_ten_thousand_required_calls_are_accepted_by_their_tools(
    name: ToolParserName, tokens: bool, parameters: list[Any], parallel: bool, seed: int
) -> None:
    check_walk(name, tokens, parameters, parallel, seed)


OPENINGS: dict[ToolParserName, list[str]] = {
    "hermes": ["Let me see.\n", "<tool_call>"],
    "mistral": ["Well, ", "[TOOL_CALLS]"],
    "llama3_json": ['{"name": "f"', ', "parameters": '],
    "pythonic": ["[f", "("],
}


@pytest.mark.parametrize("name", CALL_FORMATS)
@pytest.mark.parametrize("tokens", [True, False])
@given(parameters=PARAMETERS, seed=st.integers(0, 2**32))
def test_a_call_that_the_model_opens_is_accepted_by_its_tool(
    name: ToolParserName, tokens: bool, parameters: Any, seed: int
) -> None:
    model = model_of(name, tokens=tokens)
    tools = offered([None, None, parameters], required=False)
    text, ended = walk(answer_grammar(model, tools, None, None), Random(seed), OPENINGS[name], markers=tokens)
    content, calls = check_calls(text, ended, model, tools)
    if ended:
        assert content in ("", OPENINGS[name][0].strip())
        assert calls >= 1


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("required", [True, False])
def test_a_line_break_after_a_call_lets_the_answer_end_or_another_call_follow(required: bool, tokens: bool) -> None:
    grammar = answer_grammar(model_of("hermes", tokens=tokens), offered([None], required=required), None, None)
    tokenizer, library, _ = vocabulary(tokens)
    matcher = compile_grammar(GrammarSpec(kind="lark", text=grammar), library)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>\n'
    for text in (call, call):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()


@pytest.mark.parametrize("name", CALL_FORMATS)
@pytest.mark.parametrize("text", ["Hello.", "Hi <tool_cal", '{"name": "Bob"}', "[f, g]", "1 < 2 [x](y)"])
def test_text_without_a_call_is_free(name: ToolParserName, text: str) -> None:
    for tokens in (True, False):
        grammar = answer_grammar(model_of(name, tokens=tokens), offered([None], required=False), None, None)
        written, _ = walk(grammar, Random(1), [text], markers=tokens)
        assert written.startswith(text)


@given(seed=st.integers(0, 2**32), budget=st.integers(0, 5), begun=st.booleans(), required=st.booleans())
def test_reasoning_ends_within_its_budget_and_a_call_may_follow(
    seed: int, budget: int, begun: bool, required: bool
) -> None:
    tokenizer, _, markers = vocabulary()
    model = AnswerFormat(calls=CALL_FORMATS["hermes"], markers=markers)
    tools = offered([None], required=required)
    plan = ReasoningPlan(form=THINK, begun=begun, budget=budget)
    text, ended = walk(answer_grammar(model, tools, plan, None), Random(seed), [] if begun else ["<think>"])
    parser = ReasoningParser(THINK, begun=begun)
    reasoning, answer, _ = joined([*parser.push(text), *parser.finish()])
    before = text.partition(THINK.end)[0].removeprefix(THINK.begin)
    assert len(tokenizer.encode(before, add_special_tokens=False).ids) <= budget * 2 or budget == 0 == len(before)
    assert reasoning == before.strip()
    if ended and required:
        assert check_calls(answer, ended, model, tools) == ("", 1) or check_calls(answer, ended, model, tools)[1] > 1


def test_reasoning_without_a_budget_is_free_and_so_is_the_schema_after_it() -> None:
    model = AnswerFormat(markers=vocabulary()[2])
    plan = ReasoningPlan(form=THINK, begun=True, budget=None)
    text, _ = walk(answer_grammar(model, None, plan, {"const": "x"}), Random(1), ["some thoughts", "</think>"])
    assert json.loads(text.partition(THINK.end)[2]) == "x"


def test_a_budget_needs_a_marker_that_is_one_token() -> None:
    with pytest.raises(RequestError, match="thinking_token_budget needs a model with </think> as one token"):
        answer_grammar(AnswerFormat(), None, ReasoningPlan(form=THINK, begun=True, budget=5), None)


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (UNIQUE, 'the parameters of f cannot be used: Unimplemented keys: ["uniqueItems"].'),
        ({"properties": {"a": {"type": "strin"}}}, "the parameters of f cannot be used: Invalid type: strin."),
        ({"properties": {"a": {"pattern": "a(?=b)", "type": "string"}}}, "look-around"),
        ({"properties": {"a": {"enum": []}}, "required": ["a"]}, "Unsatisfiable"),
    ],
)
def test_a_schema_that_no_grammar_holds_is_refused_with_the_name_of_its_function(
    parameters: dict[str, Any], said: str
) -> None:
    tools = offered([None, None, parameters])
    grammar = answer_grammar(model_of("hermes", tokens=True), tools, None, None)
    with pytest.raises(GrammarError) as refused:
        compile_grammar(GrammarSpec(kind="lark", text=grammar), vocabulary()[1])
    assert said in str(refused.value)


def test_with_auto_a_keyword_that_no_grammar_holds_is_ignored_unless_the_function_is_strict() -> None:
    for strict in (None, True):
        function = FunctionDefinition(name="f", parameters=UNIQUE, strict=strict)
        tools = OfferedTools(functions=(function,), callable=(function,), required=False, parallel=True, legacy=False)
        spec = GrammarSpec(kind="lark", text=answer_grammar(model_of("hermes", tokens=True), tools, None, None))
        if strict:
            with pytest.raises(GrammarError, match="uniqueItems"):
                compile_grammar(spec, vocabulary()[1])
        else:
            compile_grammar(spec, vocabulary()[1])


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "object", "anyOf": [{}]}, "have 'anyOf', which pythonic calls cannot hold"),
        ({"properties": ["a"]}, "need `properties` by name and a list of names `required`"),
        ({"required": [{}]}, "need `properties` by name and a list of names `required`"),
        ({"properties": {"a b": {}}}, "cannot hold 'a b'"),
    ],
)
def test_pythonic_calls_hold_plain_arguments_only(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        answer_grammar(model_of("pythonic", tokens=False), offered([parameters]), None, None)

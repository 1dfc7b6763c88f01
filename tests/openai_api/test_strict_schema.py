"""With `strict: true`, an answer has no property that its schema does not list, at any depth."""

import json
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import pydantic_function_tool
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel

from mars_ray.batch.rows.row_options import sampling_of
from mars_ray.chat.call_format import CALL_FORMATS, NO_TOOLS, AnswerFormat
from mars_ray.chat.tools import FunctionDefinition
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import RequestError
from mars_ray.openai_api.answer_grammar import answer_grammar
from mars_ray.openai_api.protocol import ChatCompletionRequest, JsonSchemaFormat
from mars_ray.openai_api.strict_schema import closed_schema
from mars_ray.openai_api.tools import OfferedTools
from tests.openai_api.grammar_walks import vocabulary, walk

NAMES = ("name", "age", "a b")
LEAVES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"enum": ["x", {"y": 1}]},
    {"type": "null"},
]
REFERENCES = [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/node", "description": "a node"}, {"$ref": "#/$defs/pair"}]


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that say nothing about properties that they do not list."""
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    forms = [{"type": "object"}, {"type": ["object", "null"]}, {}]
    return st.builds(
        lambda form, properties, all_required: (
            form | {"properties": properties} | ({"required": list(properties)} if all_required else {})
        ),
        st.sampled_from(forms),
        properties,
        st.booleans(),
    )


def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    union = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        objects(inner),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda items: {"type": "array", "prefixItems": items, "items": False}, union),
        st.builds(lambda parts: {"anyOf": parts}, union),
        st.builds(lambda part: {"allOf": [part], "title": "one"}, inner),
    )


SCHEMAS = st.recursive(st.sampled_from([*LEAVES, *REFERENCES]), wider, max_leaves=6)
ROOTS = st.builds(
    lambda properties, node, pair: {
        "type": "object",
        "properties": properties,
        "$defs": {"node": node, "pair": {"anyOf": [pair, {"type": "null"}]}},
    },
    st.dictionaries(st.sampled_from(NAMES), SCHEMAS, min_size=1, max_size=3),
    st.just({"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}),
    objects(st.sampled_from(LEAVES)),
)


def fits(value: Any, schema: Any, root: dict[str, Any]) -> bool:
    """Whether a value conforms to a schema of `SCHEMAS` and has no property that is not listed."""
    if schema is False:
        return False
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if parts := schema.get("anyOf") or schema.get("allOf"):
        return any(fits(value, part, root) for part in parts)
    if "enum" in schema:
        return value in schema["enum"]
    if "type" not in schema and not isinstance(value, dict):
        return True
    kinds = schema.get("type", "object")
    if value is None:
        return "null" in kinds
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return (
            "object" in kinds
            and value.keys() >= set(schema.get("required", ()))
            and all(key in properties and fits(item, properties[key], root) for key, item in value.items())
        )
    if isinstance(value, list):
        items = schema.get("prefixItems", [schema.get("items")] * len(value))
        return kinds == "array" and all(fits(item, part, root) for item, part in zip(value, items, strict=False))
    return kinds == "integer"


def text_format(schema: dict[str, Any], **fields: Any) -> ChatCompletionRequest:
    named = {"name": "answer", "schema": schema} | fields
    form = {"type": "json_schema", "json_schema": named}
    return ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "response_format": form}
    )


def grammar_of_text(schema: dict[str, Any]) -> str:
    [form] = [text_format(schema, strict=True).response_format]
    assert isinstance(form, JsonSchemaFormat)
    return answer_grammar(NO_TOOLS, None, None, form.json_schema.enforced)


def grammar_of_call(schema: dict[str, Any]) -> str:
    function = FunctionDefinition(name="f", parameters=schema, strict=True)
    tools = OfferedTools(functions=(function,), callable=(function,), required=True, parallel=False, legacy=False)
    model = AnswerFormat(calls=CALL_FORMATS["hermes"], template_takes_tools=True, markers=vocabulary(False)[2])
    return answer_grammar(model, tools, None, None)


@given(ROOTS, st.integers(0, 2**32))
def test_a_strict_answer_has_no_property_that_its_schema_does_not_list(schema: dict[str, Any], seed: int) -> None:
    before = deepcopy(schema)
    text, ended = walk(grammar_of_text(schema), Random(seed), markers=False)
    assert not ended or fits(json.loads(text), schema, schema), text
    assert schema == before


@given(ROOTS, st.integers(0, 2**32))
def test_strict_arguments_have_no_property_that_their_schema_does_not_list(schema: dict[str, Any], seed: int) -> None:
    text, ended = walk(grammar_of_call(schema), Random(seed), markers=False)
    if ended:
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert fits(call["arguments"], schema, schema), text


class Address(BaseModel):
    city: str
    lines: list[str]


class Person(BaseModel):
    address: Address
    other: Address | None
    others: dict[str, list[Address]]


def test_a_schema_that_openais_client_has_closed_stays_as_it_is() -> None:
    for schema in (
        to_strict_json_schema(Person),
        pydantic_function_tool(Person)["function"]["parameters"],  # type: ignore[typeddict-item]
    ):
        assert closed_schema(schema) == schema


def closed_places(schema: Any) -> list[Any]:
    """The values of `additionalProperties` at all depths, in the order of the schema."""
    if isinstance(schema, list):
        return [place for item in schema for place in closed_places(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema["additionalProperties"]] if "additionalProperties" in schema else []
    return own + [place for item in schema.values() for place in closed_places(item)]


def test_an_object_is_closed_where_openais_client_closes_it() -> None:
    assert closed_places(closed_schema(Person.model_json_schema())) == closed_places(to_strict_json_schema(Person))


@pytest.mark.parametrize("more", [True, {"type": "integer"}, {"type": "object", "additionalProperties": True}])
def test_properties_that_a_schema_allows_itself_stay_allowed(more: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "additionalProperties": more}}}
    closed = closed_schema(schema)
    assert closed == schema | {"additionalProperties": False}


def test_without_strict_objects_of_a_response_format_stay_open() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    for fields in ({}, {"strict": False}, {"strict": None}):
        form = text_format(schema, **fields).response_format
        assert isinstance(form, JsonSchemaFormat) and form.json_schema.enforced == schema


A = {"properties": {"a": {"type": "null"}}}
B = {"properties": {"b": {"type": "null"}}}


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_each_alternative_is_closed_by_itself(keyword: str) -> None:
    closed = {"additionalProperties": False}
    schema = {"type": "object", keyword: [A, {}, {"type": "null"}]}
    assert closed_schema(schema) == {"type": "object", keyword: [A | closed, closed, {"type": "null"}]}
    needed = [{"required": ["a"]}, {"required": ["b"]}]
    both = {"type": "object", "properties": A["properties"] | B["properties"], keyword: needed}
    assert closed_schema(both) == both | closed


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}},
        A | {"anyOf": [B, {"required": ["a"]}]},
        A | {"oneOf": [{"allOf": [B]}]},
        A | {"$ref": "#/$defs/b", "$defs": {"b": B}},
        {"anyOf": [A], "allOf": [B]},
        A | {"if": {}, "then": B},
        A | {"dependentSchemas": {"a": B}},
    ],
)
def test_an_object_that_cannot_be_closed_is_refused_with_what_to_do(schema: dict[str, Any]) -> None:
    for place in (schema, {"type": "object", "properties": {"x": {"type": "array", "items": schema}}}):
        with pytest.raises(RequestError, match="Merge them, set additionalProperties, or leave strict out"):
            closed_schema(place)


@pytest.mark.parametrize(
    "schema", [A | {"anyOf": 5}, {"anyOf": 5}, {"properties": 5}, {"$defs": [1], "items": [5, True]}]
)
def test_a_schema_that_is_none_is_left_to_the_engine_to_refuse(schema: dict[str, Any]) -> None:
    assert {name: item for name, item in closed_schema(schema).items() if name != "additionalProperties"} == schema


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested too deeply"):
        closed_schema(schema)


def test_a_row_of_a_job_closes_a_strict_schema_too() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": A, "strict": True}}
    grammar = sampling_of("row", {"sampling": {"response_format": form}}, SamplingParams()).grammar
    assert grammar and json.loads(grammar.text) == closed_schema(A)

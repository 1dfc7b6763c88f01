"""Grammars of all kinds, drawn at random."""

import json
import re
from typing import Any

from hypothesis import strategies as st

from mars_ray.engine.grammar.spec import GrammarSpec


def schema(value: object) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps(value))


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text)


LITERALS = st.text(alphabet="abcXYZ019 ,/é日\n", min_size=1, max_size=8).map(re.escape)
CLASSES = st.sampled_from(["[a-c]", "[0-9]", "[^a]", r"\d", "(yes|no)", "[A-Za-z ]"])
REGEXES = st.recursive(
    LITERALS | CLASSES,
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda each: f"({'|'.join(each)})")
        | st.tuples(inner, st.sampled_from(["+", "{1,3}", "{2}"])).map(lambda each: f"({each[0]}){each[1]}")
    ),
    max_leaves=6,
)
NAMES = st.text(alphabet='abcXYZ_ "é', min_size=1, max_size=8)
PLAIN_SCHEMAS: st.SearchStrategy[Any] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": ["integer", "null"]}),
    st.integers(0, 9).map(lambda length: {"type": "string", "maxLength": length}),
    st.tuples(st.integers(-99, 99), st.integers(0, 99)).map(
        lambda each: {"type": "integer", "minimum": each[0], "maximum": each[0] + each[1]}
    ),
    st.just({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    st.lists(NAMES | st.integers(0, 5), min_size=1, max_size=4, unique_by=str).map(lambda each: {"enum": each}),
    NAMES.map(lambda each: {"const": each}),
)
SCHEMAS = st.recursive(
    PLAIN_SCHEMAS,
    lambda inner: (
        st.tuples(inner, st.integers(0, 2)).map(
            lambda each: {"type": "array", "items": each[0], "minItems": each[1], "maxItems": 3}
        )
        | st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(
            lambda each: {
                "type": "object",
                "properties": each,
                "required": list(each)[:2],
                "additionalProperties": False,
            }
        )
        | st.tuples(inner, st.just({"type": "null"})).map(lambda each: {"anyOf": list(each)})
    ),
    max_leaves=4,
)
GRAMMARS = REGEXES.map(regex) | SCHEMAS.map(schema) | st.just(GrammarSpec(kind="json_object"))

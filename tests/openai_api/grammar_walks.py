"""A model that writes any token its grammar allows: what it says is whatever a grammar lets through."""

import json
from collections.abc import Iterable
from functools import cache
from random import Random
from typing import Any

from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from mars_ray.chat.call_format import MARKERS, Marker
from mars_ray.engine.grammar.library import GrammarTokenizer, compile_grammar, mask_of
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.model.resolve import resolve_model

WALK_TOKENS = 400
TEXTS = 0.1
"""How often a walk takes any token that is allowed instead of one of a few."""


@cache
def vocabulary(markers: bool = True) -> tuple[Tokenizer, LLTokenizer, dict[str, Marker]]:
    """The bundled model's vocabulary, with every marker as one token unless `markers` is false."""
    tokenizer = Tokenizer.from_file(str(resolve_model("bundled") / "tokenizer.json"))
    for marker in sorted(MARKERS) if markers else ():
        special = marker.startswith(("[", "<|"))
        tokenizer.add_special_tokens([AddedToken(marker)]) if special else tokenizer.add_tokens([AddedToken(marker)])
    ids: dict[str, Any] = {text: tokenizer.token_to_id(text) for text in MARKERS} if markers else {}
    known = {text: Marker(id, text.startswith(("[", "<|"))) for text, id in ids.items()}
    return tokenizer, GrammarTokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), (4,)).load(), known


def walk(grammar: str, draw: Random, begin: Iterable[str] = (), *, markers: bool = True) -> tuple[str, bool]:
    """Return what a random model writes after `begin`, and whether its answer ended by itself.

    The model ends as soon as it may, and otherwise prefers what ends texts and lists.
    """
    tokenizer, library, _ = vocabulary(markers)
    matcher = compile_grammar(GrammarSpec(kind="lark", text=grammar), library)
    tokens: list[int] = []
    for text in begin:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert matcher.try_consume_tokens(ids) == len(ids), text
        tokens += ids
    closing = [tokenizer.encode(text, add_special_tokens=False).ids[0] for text in ('"', "}", "]", ")", "1", "0", ",")]
    for _ in range(WALK_TOKENS):
        if matcher.is_stopped() or (matcher.is_accepting() and draw.random() < 0.5):
            return tokenizer.decode(tokens, skip_special_tokens=False), True
        allowed_V = mask_of(matcher, library.vocab_size)
        allowed_V[library.eos_tokens] = False
        ids = allowed_V.nonzero()[0].tolist()
        if not ids:
            return tokenizer.decode(tokens, skip_special_tokens=False), True
        likely = [token for token in closing if allowed_V[token]]
        token = draw.choice(likely) if likely and draw.random() > TEXTS else draw.choice(ids)
        assert matcher.consume_token(token)
        tokens.append(token)
    return tokenizer.decode(tokens, skip_special_tokens=False), False


KEYS = st.from_regex(r"[a-z_][a-zA-Z0-9_-]{0,8}", fullmatch=True)
SCALARS = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-z]{2,4}$"},
        {"type": "string", "format": "date"},
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["string", "null"]},
        {"enum": ["a", 'b"c', 3, None, True]},
        {"const": "fixed\n"},
        {"$ref": "#/$defs/shared"},
    ]
)


def objects_of(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Object schemas, of whose properties some are required."""

    @st.composite
    def schema(draw: st.DrawFn) -> dict[str, Any]:
        properties = draw(st.dictionaries(KEYS, values, max_size=4))
        required = [name for name in properties if draw(st.booleans())]
        made = {"type": "object", "properties": properties, "required": required}
        return made | draw(st.sampled_from([{}, {"additionalProperties": False}]))

    return schema()


SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(1, 3)}),
        objects_of(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)
PARAMETERS = st.none() | objects_of(SCHEMAS).map(
    lambda schema: schema | {"$defs": {"shared": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
)


def parsed_arguments(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which are an object."""
    value = json.loads(arguments)
    assert isinstance(value, dict)
    return value

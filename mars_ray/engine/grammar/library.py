"""Grammars in the form that llguidance reads, and their check.

Neither torch nor a tokenizer is loaded, so that a server that only passes requests on can check them.

Of JSON one layout is allowed, that of Python's `json.dumps`: between two values there is nothing left to choose, and a
model cannot lose itself in white space.
"""

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits

from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.errors import RequestError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LAYOUT: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LIMITS = LLParserLimits(
    max_grammar_size=20_000, max_lexer_states=20_000, initial_lexer_fuel=100_000, verbose_errors=False
)
"""Limits below the library's own: a grammar that is large and slow on purpose holds 30 MB and takes a tenth of a
second, not 200 MB and three seconds, and its errors do not quote it at length."""

REASON_CHARACTERS = 300


def library_grammar(spec: GrammarSpec) -> str:
    """Return `spec` in the library's form. Raises `RequestError` for what is no text or no schema at all."""
    schema = spec.text if spec.kind == "json_schema" else json.dumps({"type": "object"})
    try:
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        return LLMatcher.grammar_from_json_schema(schema, overrides=LAYOUT)
    except ValueError as error:
        raise unusable(spec, str(error)) from error


@lru_cache(64)
def check_grammar(spec: GrammarSpec) -> None:
    """Raise a `RequestError` for a grammar that cannot be used with any tokenizer."""
    if reason := LLMatcher.validate_grammar(library_grammar(spec), limits=LIMITS):
        raise unusable(spec, reason)


def unusable(spec: GrammarSpec, reason: str) -> RequestError:
    """Return the error that says why."""
    return RequestError(f"the {spec.kind} cannot be used: {' '.join(reason.split())[:REASON_CHARACTERS].rstrip('.')}.")

"""Grammars in the form that llguidance reads, compiled for one tokenizer.

Neither torch nor transformers is loaded, so that the process that checks grammars is small (see `check_worker`).

Of JSON one layout is allowed, that of Python's `json.dumps`: between two values there is nothing left to choose, and a
model cannot lose itself in white space.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.errors import GrammarError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LAYOUT: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LIMITS = LLParserLimits(
    max_grammar_size=20_000,
    max_lexer_states=20_000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=60_000,
    max_items_in_row=5_000,
    verbose_errors=False,
)
"""Bounds on the work of one mask: 20 ms at most for a grammar that is slow on purpose. `max_items_in_row` is above the
library's own, so that an object may have a thousand optional properties. The library bounds neither the time nor the
memory of compiling (intersections of patterns, `multipleOf`); `process/grammar_checker` does."""

REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """The tokenizer of a model as llguidance reads it."""

    json: str
    vocabulary: int
    stop_ids: tuple[int, ...]
    """Ids that may come where the answer may end; empty for those of the tokenizer itself."""

    def load(self) -> LLTokenizer:
        """Return the library's form: a second of work for a large vocabulary."""
        return LLTokenizer(self.json, n_vocab=self.vocabulary, eos_token=list(self.stop_ids) or None)


def library_grammar(spec: GrammarSpec) -> str:
    """Return `spec` in the library's form. Raises `GrammarError` for what is no text or no schema at all."""
    schema = spec.text if spec.kind == "json_schema" else json.dumps({"type": "object"})
    try:
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        return LLMatcher.grammar_from_json_schema(schema, overrides=LAYOUT)
    except ValueError as error:
        raise unusable(spec, str(error)) from error


def compile_grammar(spec: GrammarSpec, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the state before the first token, with its mask computed. Raises `GrammarError`.

    Other threads run meanwhile: the library releases the interpreter.
    """
    compiled = LLMatcher(tokenizer, library_grammar(spec), log_level=0, limits=LIMITS)
    first_V = mask_of(compiled, tokenizer.vocab_size)  # whether any text is allowed shows only here
    if compiled.is_error():
        raise unusable(spec, compiled.get_error())
    first_V[tokenizer.eos_tokens] = False
    if not first_V.any():
        raise unusable(spec, "no text but the empty one is allowed")
    return compiled


def mask_of(matcher: LLMatcher, vocabulary: int) -> NDArray[np.bool_]:
    """Return for every token whether it may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(bits, bitorder="little", count=vocabulary).astype(bool)


@lru_cache(64)
def check_grammar(spec: GrammarSpec) -> None:
    """Raise a `GrammarError` for a grammar that cannot be used with any tokenizer.

    It compiles in this process, without a limit of time or memory: for a user's own schema in the user's own process.
    """
    if reason := LLMatcher.validate_grammar(library_grammar(spec), limits=LIMITS):
        raise unusable(spec, reason)


def unusable(spec: GrammarSpec, reason: str) -> GrammarError:
    """Return the error that says why."""
    return GrammarError(f"the {spec.kind} cannot be used: {' '.join(reason.split())[:REASON_CHARACTERS].rstrip('.')}.")

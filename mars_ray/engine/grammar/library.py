"""Compile grammars for one tokenizer with llguidance.

This module imports neither torch nor transformers, to keep `check_worker` small.

JSON must have the layout of Python's `json.dumps`; otherwise a model could generate white space endlessly.
"""

import json
import re
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
"""Limits on the work for one token mask, which takes at most 20 ms even for a hostile grammar. `max_items_in_row` is
above the library's default, to allow a thousand optional properties in an object. The library does not limit the time
or memory of compilation, for example of intersecting patterns or `multipleOf`; `process/grammar_checker` does."""

REASON_CHARACTERS = 300
NO_FAST_TOKENIZER = "this model supports no grammars, because its tokenizer is not a fast tokenizer."


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """The tokenizer of a model, in the format of llguidance."""

    json: str
    vocabulary: int
    stop_ids: tuple[int, ...]
    """Token ids allowed where the answer may end. Empty means the end-of-text tokens of the tokenizer."""

    def load(self) -> LLTokenizer:
        """Return the library's tokenizer. This takes about a second for a large vocabulary."""
        return LLTokenizer(self.json, n_vocab=self.vocabulary, eos_token=list(self.stop_ids) or None)


def library_grammar(spec: GrammarSpec) -> str:
    """Return `spec` in the library's format. Raises `GrammarError` for an invalid schema or expression."""
    schema = spec.text if spec.kind == "json_schema" else json.dumps({"type": "object"})
    try:
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        if spec.kind == "lark":
            return LLMatcher.grammar_from_lark(spec.text)
        return LLMatcher.grammar_from_json_schema(schema, overrides=LAYOUT)
    except ValueError as error:
        raise unusable(spec, str(error)) from error


def compile_grammar(spec: GrammarSpec, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the first token, with its token mask computed. Raises `GrammarError`.

    The library releases the interpreter lock during compilation.
    """
    compiled = LLMatcher(tokenizer, library_grammar(spec), log_level=0, limits=LIMITS)
    first_V = mask_of(compiled, tokenizer.vocab_size)  # only the mask shows whether the grammar allows any text
    if compiled.is_error():
        raise unusable(spec, compiled.get_error())
    first_V[tokenizer.eos_tokens] = False
    if not first_V.any():
        raise unusable(spec, "it allows only the empty text")
    return compiled


def mask_of(matcher: LLMatcher, vocabulary: int) -> NDArray[np.bool_]:
    """Return whether each token may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(bits, bitorder="little", count=vocabulary).astype(bool)


@lru_cache(64)
def check_grammar(spec: GrammarSpec) -> None:
    """Raise a `GrammarError` for a grammar that is invalid whatever the tokenizer.

    The grammar is compiled in the calling process without limits, so use it only for the user's own grammars.
    """
    if reason := LLMatcher.validate_grammar(library_grammar(spec), limits=LIMITS):
        raise unusable(spec, reason)


def unusable(spec: GrammarSpec, reason: str) -> GrammarError:
    """Return an error that says why a grammar cannot be used."""
    subject = f"the {spec.kind}"
    if spec.kind == "lark":
        subject, reason = _in_lark(spec.text, reason)
    return GrammarError(f"{subject} cannot be used: {' '.join(reason.split())[:REASON_CHARACTERS].rstrip('.')}.")


def _in_lark(text: str, reason: str) -> tuple[str, str]:
    """Return what an error in a Lark grammar is about, and its reason without the place and the lines quoted.

    A comment before a rule names the part of the request that the rule comes from.
    """
    position = re.match(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?", reason)
    if position is None:
        return "the grammar of the answer", reason
    line_before = text.splitlines()[int(position[1]) - 2]
    subject = line_before.removeprefix("// ") if line_before.startswith("// ") else "the grammar of the answer"
    return subject, re.split(r"\n +\d+ \| ", reason[position.end() :])[0]

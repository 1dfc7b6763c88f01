"""Compiled grammars of one tokenizer, and the position of each sequence in its grammar.

Stop tokens are not part of a grammar; they are allowed wherever the answer may end. The allowed tokens depend only on
the previous tokens, not on the way they were decoded, so grammars work the same in all decoding modes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from itertools import takewhile
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mars_ray.engine.grammar.library import NO_FAST_TOKENIZER, GrammarTokenizer, compile_grammar, mask_of
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.errors import GrammarError, StepError

KEPT = 16
"""Maximum number of grammars to keep among those compiled without `prepare`."""


class ModelTokens(Protocol):
    """The tokenizer of a model and its special tokens, such as a `Checkpoint`."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""

    @property
    def mask_id(self) -> int:
        """Id of the mask token."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a response."""


class Grammars:
    """Compiled grammars for the tokenizer of a checkpoint."""

    def __init__(self, checkpoint: ModelTokens, vocabulary: int) -> None:
        self._checkpoint = checkpoint
        self._vocabulary = vocabulary
        self._prepared: dict[GrammarSpec, LLMatcher] = {}
        self._compiled_here = OrderedDict[GrammarSpec, LLMatcher]()
        self._library_tokenizer: LLTokenizer | None = None

    def prepare(self, spec: GrammarSpec) -> None:
        """Compile a grammar and keep it until `forget`. Any thread may call this. Raises `GrammarError`."""
        self._prepared[spec] = compile_grammar(spec, self._tokenizer())

    def forget(self, spec: GrammarSpec) -> None:
        """Drop a prepared grammar. Running sequences keep their matchers."""
        self._prepared.pop(spec, None)

    def matcher(self, spec: GrammarSpec, stop_ids: frozenset[int]) -> "Matcher":
        """Return a new matcher at the first token. Raises `GrammarError` for an unusable grammar."""
        compiled = self._prepared.get(spec) or self._compiled(spec)
        no_text = stop_ids.union(self._tokenizer().eos_tokens, [self._checkpoint.mask_id])
        return Matcher(compiled.deep_copy(), stop_ids, no_text, self._vocabulary)

    def load(self) -> GrammarTokenizer:
        """Load the tokenizer and return it for another process. Raises `GrammarError` unless it is a fast tokenizer."""
        backend = getattr(self._checkpoint.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise GrammarError(NO_FAST_TOKENIZER)
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        stop_ids = tuple(sorted(self._checkpoint.stop_ids))
        tokenizer = GrammarTokenizer(backend.to_str(), self._vocabulary, stop_ids)
        self._library_tokenizer = tokenizer.load()
        return tokenizer

    def _compiled(self, spec: GrammarSpec) -> LLMatcher:
        if spec not in self._compiled_here:
            self._compiled_here[spec] = compile_grammar(spec, self._tokenizer())
            if len(self._compiled_here) > KEPT:
                self._compiled_here.popitem(last=False)
        self._compiled_here.move_to_end(spec)
        return self._compiled_here[spec]

    def _tokenizer(self) -> LLTokenizer:
        if self._library_tokenizer is None:
            self.load()
        assert self._library_tokenizer is not None
        return self._library_tokenizer


class Matcher:
    """Position of one sequence in its grammar, after settled tokens and tokens taken ahead."""

    def __init__(self, library: LLMatcher, stop_ids: frozenset[int], no_text: frozenset[int], vocabulary: int) -> None:
        self._library = library
        self._stop_ids = stop_ids
        self._no_text = no_text
        self._vocabulary = vocabulary
        self.ahead: list[int] = []
        """Tokens taken since the last `settle`."""
        self._plans: list[tuple[list[int], int]] = [([], 0)]
        """Pairs of forced tokens and how many of them were taken: one pair for the state before each token of `ahead`,
        and one for the state after the last."""

    @property
    def ended(self) -> bool:
        """True once the answer is complete and no token may follow."""
        return self._library.is_stopped() and not self._library.is_error()

    def forced(self) -> int | None:
        """Return the next token if the grammar allows only one text and the tokenizer has one spelling for it."""
        run, taken = self._plans[-1]
        if taken == len(run):
            run = self._library.compute_ff_tokens()
            taken = 0
            self._plans[-1] = (run, taken)
        return run[taken] if run and run[taken] not in self._no_text else None

    def take(self, token: int) -> bool:
        """Take one token and return whether it is allowed. An allowed stop token does not change the position."""
        if token in self._stop_ids:
            return self._library.is_accepting()
        if token in self._no_text or not self._library.try_consume_tokens([token]):
            return False
        run, taken = self._plans[-1]
        self.ahead.append(token)
        self._plans.append((run, taken + 1) if run[taken : taken + 1] == [token] else ([], 0))
        return True

    def take_forced(self, room: int) -> list[int]:
        """Take up to `room` forced tokens, and return them."""
        run: list[int] = []
        while len(run) < room and (token := self.forced()) is not None and self.take(token):
            run.append(token)
        return run

    def take_unforced(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the first that is forced or forbidden, and return how many were taken."""
        for count, token in enumerate(tokens):
            if self.forced() is not None or not self.take(token):
                return count
        return len(tokens)

    def seek(self, ahead: list[int]) -> None:
        """Move to the position after the settled tokens and `ahead`.

        Raises `StepError` if a token is not allowed, and `GrammarError` if the library fails.
        """
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.ahead, ahead, strict=False)))
        if back := len(self.ahead) - same:
            self._library.rollback(back)
            del self.ahead[same:], self._plans[same + 1 :]
        if not all(self.take(token) for token in ahead[same:]):
            raise self._stuck()

    def settle(self) -> None:
        """Settle all tokens taken ahead."""
        self.ahead.clear()
        del self._plans[:-1]

    def allowed(self) -> NDArray[np.bool_]:
        """Return whether each token of the vocabulary may come next.

        Raises `StepError` if none may, and `GrammarError` if the library fails.
        """
        allowed_V = mask_of(self._library, self._vocabulary)
        allowed_V[list(self._no_text)] = False
        if self._library.is_accepting():
            allowed_V[list(self._stop_ids)] = True
        if self._library.is_error() or not allowed_V.any():
            raise self._stuck()
        return allowed_V

    def _stuck(self) -> GrammarError | StepError:
        if self._library.is_error():
            return GrammarError(f"the grammar cannot be followed any further: {self._library.get_error()}.")
        return StepError("the grammar cannot be followed any further: no token of the vocabulary may follow.")

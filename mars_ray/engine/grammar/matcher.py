"""Which tokens a grammar allows next: grammars made ready for one tokenizer, and where in its grammar a sequence is.

No logit is looked at. A stop token never enters the grammar: one may come wherever the answer may end. What a
state says depends on the tokens before it alone and not on how they were reached, so that all modes say the same.
"""

from functools import lru_cache
from itertools import takewhile

import llguidance.hf
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from mars_ray.engine.grammar.library import LIMITS, library_grammar, unusable
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.errors import StepError
from mars_ray.model.checkpoint import Checkpoint

KEPT = 16
"""Grammars of earlier requests that are kept ready; they hold half a gigabyte at most, and a few MB as a rule."""


class Grammars:
    """Makes grammars ready for the tokenizer of `checkpoint`."""

    def __init__(self, checkpoint: Checkpoint, vocabulary: int) -> None:
        self._checkpoint, self._vocabulary = checkpoint, vocabulary
        self._ready = lru_cache(KEPT)(self._make_ready)
        self._library_tokenizer: LLTokenizer | None = None

    def matcher(self, spec: GrammarSpec, stop_ids: frozenset[int]) -> "Matcher":
        """Return the state before the first token. Raises `RequestError` for a grammar that cannot be used."""
        ready = self._ready(spec)
        no_text = stop_ids.union(self._tokenizer().eos_tokens, [self._checkpoint.mask_id])
        return Matcher(ready.deep_copy(), stop_ids, no_text, self._vocabulary)

    def _make_ready(self, spec: GrammarSpec) -> LLMatcher:
        library = LLMatcher(self._tokenizer(), library_grammar(spec), log_level=0, limits=LIMITS)
        first_V = _tokens_of(library, self._vocabulary)  # whether there are any comes out here
        if library.is_error():
            raise unusable(spec, library.get_error())
        first_V[self._tokenizer().eos_tokens] = False
        if not first_V.any():
            raise unusable(spec, "no text but the empty one is allowed")
        return library

    def _tokenizer(self) -> LLTokenizer:
        if self._library_tokenizer is None:  # a second of work for a large vocabulary, which few engines need
            tokenizer, stops = self._checkpoint.tokenizer, sorted(self._checkpoint.stop_ids)
            self._library_tokenizer = llguidance.hf.from_tokenizer(tokenizer, self._vocabulary, stops or None)
        return self._library_tokenizer


class Matcher:
    """Where one sequence is in its grammar: behind its settled tokens and the tokens taken ahead of them."""

    def __init__(self, library: LLMatcher, stop_ids: frozenset[int], no_text: frozenset[int], vocabulary: int) -> None:
        self._library, self._stop_ids, self._no_text, self._vocabulary = library, stop_ids, no_text, vocabulary
        self.ahead: list[int] = []
        """Tokens taken and not settled."""
        self._plans: list[tuple[list[int], int]] = [([], 0)]
        """Before each token ahead and behind the last: a run of forced tokens, and how many of them were taken."""

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return self._library.is_stopped() and not self._library.is_error()

    def forced(self) -> int | None:
        """Return the token that must come next, where its text must and the tokenizer spells that in one way."""
        run, taken = self._plans[-1]
        if taken == len(run):
            run, taken = self._library.compute_ff_tokens(), 0
            self._plans[-1] = (run, taken)
        return run[taken] if run and run[taken] not in self._no_text else None

    def take(self, token: int) -> bool:
        """Go one token ahead and return whether it is allowed. A stop token may be allowed, and leads nowhere."""
        if token in self._stop_ids:
            return self._library.is_accepting()
        if token in self._no_text or not self._library.try_consume_tokens([token]):
            return False
        run, taken = self._plans[-1]
        self.ahead.append(token)
        self._plans.append((run, taken + 1) if run[taken : taken + 1] == [token] else ([], 0))
        return True

    def take_forced(self, room: int) -> list[int]:
        """Go ahead as far as every token is forced, at most `room` of them, and return them."""
        run: list[int] = []
        while len(run) < room and (token := self.forced()) is not None and self.take(token):
            run.append(token)
        return run

    def seek(self, ahead: list[int]) -> None:
        """Go to where the settled tokens and `ahead` lead; all of them must be allowed."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.ahead, ahead, strict=False)))
        if back := len(self.ahead) - same:
            self._library.rollback(back)
            del self.ahead[same:], self._plans[same + 1 :]
        if not all(self.take(token) for token in ahead[same:]):
            raise self._stuck()

    def settle(self) -> None:
        """Settle what was taken ahead."""
        self.ahead.clear()
        del self._plans[:-1]

    def allowed(self) -> NDArray[np.bool_]:
        """Return for every token of the vocabulary whether it may come next. Raises `StepError` where none may."""
        allowed_V = _tokens_of(self._library, self._vocabulary)
        allowed_V[list(self._no_text)] = False
        if self._library.is_accepting():
            allowed_V[list(self._stop_ids)] = True
        if self._library.is_error() or not allowed_V.any():
            raise self._stuck()
        return allowed_V

    def _stuck(self) -> StepError:
        reason = self._library.get_error() or "no token of the vocabulary may follow"
        return StepError(f"the grammar cannot be followed any further: {reason}.")


def _tokens_of(library: LLMatcher, vocabulary: int) -> NDArray[np.bool_]:
    bits = np.frombuffer(library.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(bits, bitorder="little", count=vocabulary).astype(bool)

"""Draft what a sequence probably copies: from its answer, its prompt, or recent answers of the same owner.

The longest match for the end of the sequence gives the continuation, and an estimate that learns from verification
gives the probability that each of its tokens is right. So a copy of long standing is drafted far ahead, and two tokens
that happened to follow a common phrase are not.

A draft is a chain. Where a copy reaches the end of its text, the longest match for all drafts so far continues it, so
text that repeats itself is drafted on and on. Within a grammar, a copy ends before the first token that the grammar
forbids or forces, the forced tokens follow, and then a copy of what follows these elsewhere.

Sources: prompt lookup decoding (Saxena 2023); SuffixDecoding, arXiv 2411.04975.
"""

import math
from collections.abc import Hashable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from mars_ray.engine.drafting.estimate import AcceptanceEstimate
from mars_ray.engine.drafting.recent_answers import RecentAnswers
from mars_ray.engine.drafting.text_index import LONGEST, TextIndex, TextMatch
from mars_ray.engine.grammar.matcher import Matcher
from mars_ray.method.drafts import PositionPrice

DRAFTS_MOST = 32
"""Maximum number of drafts from text in a step."""

PROMPT_TOKENS_PER_STEP = 4096
"""Maximum number of prompt tokens that a step adds to an index, which takes about 4 ms."""

FIRST_REST = 2048
"""Number of drafts refused in a row after which drafts are tried again. Each trial that fails doubles the number."""

LONGEST_REST = 2**20

TRIAL_DRAFTS = 200
"""Number of verified drafts after which drafts that are still worth their price have passed the trial."""

USUAL_WEIGHTS = (1.7, 1.0, 2.6, -1.0)
"""Weights of `_features` before the first draft: a fit to 3,700 drafts of Qwen2.5-Coder-0.5B in six tasks, without the
last one, which is a guess."""

USUAL_LENGTH, USUAL_SHARE = 3.0, 0.8
"""Means of the features of those drafts, so that features are small numbers of both signs."""


@dataclass(slots=True)
class SequenceText:
    """Indexes of one sequence."""

    prompt: TextIndex
    """Index of the prompt, which all sequences of a request share."""
    answer: TextIndex = field(default_factory=TextIndex)
    """Index of the answer, with the end of the prompt before it."""
    indexed: int = 0
    """Number of tokens of the sequence in `answer`, or before its text."""


@dataclass(frozen=True, slots=True)
class TextDraft:
    """Tokens that probably follow, with the probability that each is right if all before it are right."""

    tokens: list[int]
    confidences: list[float]
    features: list[tuple[float, ...] | None]
    """Input of the estimate for each token; None for a token that a grammar forces."""

    def worth(self, price: PositionPrice) -> tuple[int, float]:
        """Return how many tokens are worth the `price` of their positions, and what they gain beyond it.

        Forced tokens gain and cost nothing, because they are taken anyway once the tokens before them are.
        """
        right = 1.0
        gain = 0.0
        for count, (confidence, features) in enumerate(zip(self.confidences, self.features, strict=True)):
            if features is not None:
                right *= confidence
                if right < price.of_position(count):
                    return count, gain
                gain += right - price.of_position(count)
        return len(self.tokens), gain

    def add(self, more: "TextDraft") -> None:
        """Add tokens at the end."""
        self.tokens.extend(more.tokens)
        self.confidences.extend(more.confidences)
        self.features.extend(more.features)

    def first(self, count: int) -> "TextDraft":
        """Return the first `count` tokens."""
        return TextDraft(self.tokens[:count], self.confidences[:count], self.features[:count])


class TextDrafter:
    """Drafts for the sequences of one engine."""

    def __init__(self) -> None:
        self.forget()
        self.estimate = AcceptanceEstimate(USUAL_WEIGHTS)
        self._refused = 0
        """Number of drafts refused since the last verified one."""
        self._rest = FIRST_REST

    def draft(
        self,
        text: SequenceText,
        prompt: Tokens[int],
        tokens: list[int],
        key: Hashable,
        temperature: float,
        most: int,
        grammar: Matcher | None = None,
    ) -> TextDraft:
        """Return up to `most` drafts after `tokens`, which begin with `prompt`; an empty draft without a match.

        `key` names the recent answers that the sequence may copy from; None if it may copy from none. `grammar` stands
        after `tokens`, and is there again at the end.
        """
        self._index(text, prompt, tokens)
        draft = TextDraft([], [], [])
        end = tokens[-LONGEST:]
        while (room := most - len(draft.tokens)) > 0:
            if grammar:
                forced = grammar.take_forced(room)
                draft.add(TextDraft(forced, [1.0] * len(forced), [None] * len(forced)))
                room -= len(forced)
            copy = self._copy(text, end + draft.tokens, key, temperature, room)
            if grammar:
                copy = copy.first(grammar.take_unforced(copy.tokens))
            if not copy.tokens:
                break
            draft.add(copy)
        if grammar:
            grammar.seek([])
        return draft

    def _copy(self, text: SequenceText, tokens: list[int], key: Hashable, temperature: float, most: int) -> TextDraft:
        longest = _longest((text.answer, text.answer.find(tokens)), (text.prompt, text.prompt.find(tokens)))
        if key is not None and (recent := self._recent.find(key, tokens)):
            longest = _longest(longest, recent)
        index, match = longest
        drafts = index.following(match.next, most) if match else []
        features = [_features(match, depth, temperature) for depth in range(len(drafts))] if match else []
        return TextDraft(drafts, [self.estimate.probability(row) for row in features], [*features])

    def verified(self, draft: TextDraft, right: int, judged: int) -> None:
        """Learn from the first `judged` tokens of a draft, of which the first `right` were right."""
        for index, features in enumerate(draft.features[:judged]):
            if features is not None:
                self.estimate.observe(features, index < right)
        if any(draft.features[:judged]):
            self._refused = 0
        if self.estimate.observed >= TRIAL_DRAFTS:
            self._rest = FIRST_REST

    def refused(self) -> None:
        """Record that a draft was not worth its price. After many in a row the estimate forgets what it learned,
        because it would learn nothing more without drafts."""
        self._refused += 1
        if self._refused >= self._rest:
            self.estimate = AcceptanceEstimate(USUAL_WEIGHTS)
            self._refused = 0
            self._rest = min(2 * self._rest, LONGEST_REST)

    def ended(self, key: Hashable, answer: Tokens[int]) -> None:
        """Let later sequences of the same key copy from an answer that has ended."""
        self._recent.add(key, answer)

    def forget(self) -> None:
        """Forget all answers."""
        self._recent = RecentAnswers()

    def _index(self, text: SequenceText, prompt: Tokens[int], tokens: list[int]) -> None:
        if (done := len(text.prompt.tokens)) < len(prompt):
            text.prompt.extend(prompt[done : done + PROMPT_TOKENS_PER_STEP])
        if not text.indexed:
            text.indexed = max(0, len(prompt) - LONGEST)
        text.answer.extend(tokens[text.indexed :])
        text.indexed = len(tokens)


def _longest(
    one: tuple[TextIndex, TextMatch | None], other: tuple[TextIndex, TextMatch | None]
) -> tuple[TextIndex, TextMatch | None]:
    """Return the longer match; the first one if both are equally long."""
    if one[1] is None or (other[1] is not None and other[1].length > one[1].length):
        return other
    return one


def _features(match: TextMatch, depth: int, temperature: float) -> tuple[float, ...]:
    """Return what the probability of the draft at `depth` depends on, if all drafts before it are right.

    The drafts before it lengthen the match, and leave open which of the compared places is the right one.
    """
    share = match.agreeing / match.compared - USUAL_SHARE if depth == 0 else 0.0
    return 1.0, math.log2(match.length + depth) - USUAL_LENGTH, share, min(temperature, 2.0)

"""Measure what drafts from text gain and cost, beyond the drafts from masks that they replace."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from mars_ray.engine.stats.grid import KEEP_RECENT
from mars_ray.engine.stats.lookahead import Floats


class TextGain:
    """Decayed sums over the forwards whose drafts could come from text."""

    def __init__(self) -> None:
        self._forwards = 0.0
        self._tokens = 0.0
        """Tokens gained by drafts from text."""
        self._positions = 0.0
        """Positions taken by drafts from text."""
        self._replaced_tokens = 0.0
        """Tokens gained by the drafts from masks that drafts from text replaced."""
        self._replaced_positions = 0.0
        """Positions of those drafts from masks."""

    def observe(self, drafts: int, right: int, replaced: Sequence[float]) -> None:
        """Record a forward (see `Profile.observe_text`)."""
        # Plain numbers, because every sequence does this in every step, and arrays would take ten times as long.
        self._forwards = KEEP_RECENT * self._forwards + 1
        self._tokens = KEEP_RECENT * self._tokens + right
        self._positions = KEEP_RECENT * self._positions + drafts
        self._replaced_tokens = KEEP_RECENT * self._replaced_tokens + sum(accumulate(replaced, mul))
        self._replaced_positions = KEEP_RECENT * self._replaced_positions + len(replaced)

    def by_block(self, blocks: int) -> Floats:
        """Return the tokens and the positions that text adds to an average forward, as [2, blocks]."""
        text_2 = np.array([self._tokens, self._positions])
        replaced_2 = np.array([self._replaced_tokens, self._replaced_positions])
        # Without masks there are no drafts from masks to replace.
        gain_2B: Floats = text_2[:, None] - np.outer(replaced_2, np.arange(blocks) > 0)
        return gain_2B / max(1.0, self._forwards)

"""Measure what drafts from text gain and cost, beyond the drafts from masks that they replace."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from mars_ray.engine.stats.grid import KEEP_RECENT
from mars_ray.engine.stats.lookahead import Floats


class TextGain:
    """Decayed means over the forwards whose drafts could come from text."""

    def __init__(self) -> None:
        self._forwards = 0.0
        self._text_2, self._replaced_2 = np.zeros(2), np.zeros(2)
        """Tokens gained and positions taken by drafts from text, and by the drafts from masks that they replaced."""

    def observe(self, drafts: int, right: int, replaced: Sequence[float]) -> None:
        """Record a forward (see `Profile.observe_text`)."""
        self._forwards = KEEP_RECENT * self._forwards + 1
        self._text_2 = KEEP_RECENT * self._text_2 + (right, drafts)
        self._replaced_2 = KEEP_RECENT * self._replaced_2 + (sum(accumulate(replaced, mul)), len(replaced))

    def by_block(self, blocks: int) -> Floats:
        """Return the tokens and the positions that text adds to an average forward, as [2, blocks]."""
        text_2, replaced_2 = (sums_2 / max(1.0, self._forwards) for sums_2 in (self._text_2, self._replaced_2))
        # Without masks there are no drafts from masks to replace.
        gain_2B: Floats = text_2[:, None] - np.outer(replaced_2, np.arange(blocks) > 0)
        return gain_2B

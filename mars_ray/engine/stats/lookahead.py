"""What looking ahead gives and costs in a mean forward of one sequence, for each block.

It follows from how often the token at each mask is accepted, or drafted and later found right. A block of b has b - 1
masks. Letters: `K` masks, `B` blocks, which are K + 1.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import neg
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Lookahead(NamedTuple):
    """A mean forward of one sequence, by block."""

    tokens_B: Floats
    """Tokens gained, at least 1, with blocks of 1, 2, ... B."""
    positions_B: Floats
    """Positions that go through the network: tokens, drafts and masks."""


def autoregressive(blocks: int) -> Lookahead:
    """Return what masks give whose tokens are never accepted."""
    return trusted(np.zeros(blocks - 1))


def trusted(survival_K: Floats) -> Lookahead:
    """Return what masks give whose tokens leave at once, where the k-th is accepted in this share of forwards.

    Every token is fed once more, as a token, beside the masks of the next forward.
    """
    masks_B = np.arange(len(survival_K) + 1)
    tokens_B = 1 + _sums(survival_K)
    return Lookahead(tokens_B, tokens_B + masks_B)


def verified(drafted_K: Floats, right_K: Floats, *, rows: float = 1.0) -> Lookahead:
    """Return what masks give whose tokens the next forward has to agree with (mode exact).

    `drafted_K`: share of forwards whose k-th mask gives a draft.
    `right_K`: share of those whose k-th mask gives a draft that is right, with all before it.
    `rows`: masks in a forward, as multiples of its longest row; there may be one behind each draft.
    """
    masks_B = np.arange(len(drafted_K) + 1)
    return Lookahead(1 + _sums(right_K), 1 + _sums(drafted_K) + rows * masks_B)


def between(known: Sequence[float], at: Callable[[int], Lookahead], threshold: float) -> Lookahead:
    """Return what a threshold gives, read linearly between those `known`, which fall from 1; `at` gives it for each.

    At 1 drafts are verified. Just below it nothing is: the surest masks fade out towards it.
    """
    if threshold >= 1 or len(known) == 1:
        return at(0)
    above = max(0, bisect_right(known, -threshold, key=neg) - 1)
    below = min(above + 1, len(known) - 1)
    gap = known[above] - known[below]
    weight = (known[above] - threshold) / gap if gap else 0.0
    low = at(below)
    high = at(above) if above else autoregressive(len(low.tokens_B))
    return Lookahead(*(one + weight * (other - one) for one, other in zip(high, low, strict=True)))


def _sums(values_K: Floats) -> Floats:
    return np.concatenate([[0.0], values_K.cumsum()])

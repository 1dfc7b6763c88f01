"""Compute the tokens gained and the positions used by a mean forward of one sequence, for each block size.

A block of b has b - 1 masks. Letters: K masks, B = K + 1 block sizes.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import neg
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Lookahead(NamedTuple):
    """Gain and cost of a mean forward of one sequence, by block size."""

    tokens_B: Floats
    """Tokens gained with blocks of 1, 2, ... B, each at least 1."""
    positions_B: Floats
    """Tokens, drafts and masks that go through the network."""


def autoregressive(blocks: int) -> Lookahead:
    """Return the lookahead when no token at a mask is accepted."""
    return trusted(np.zeros(blocks - 1))


def trusted(survival_K: Floats) -> Lookahead:
    """Return the lookahead when accepted tokens leave the engine at once, without verification.

    `survival_K` is the share of forwards in which the k-th mask is accepted. Each accepted token takes a position in
    the next forward.
    """
    masks_B = np.arange(len(survival_K) + 1)
    tokens_B = 1 + _sums(survival_K)
    return Lookahead(tokens_B, tokens_B + masks_B)


def verified(drafted_K: Floats, right_K: Floats, *, rows: float = 1.0) -> Lookahead:
    """Return the lookahead when the next forward verifies every draft (mode exact).

    `drafted_K` is the share of forwards whose k-th mask gives a draft. `right_K` is the share whose k-th mask gives a
    draft that is verified together with all drafts before it. `rows` is the number of masks in a forward divided by the
    length of its longest row of masks.
    """
    masks_B = np.arange(len(drafted_K) + 1)
    return Lookahead(1 + _sums(right_K), 1 + _sums(drafted_K) + rows * masks_B)


def interpolate(thresholds: Sequence[float], at: Callable[[int], Lookahead], threshold: float) -> Lookahead:
    """Interpolate the lookahead at `threshold` linearly between `thresholds`, which fall from 1.

    `at` returns the lookahead at the threshold with an index. At 1 drafts are verified. Just below 1 they are not, and
    hardly any is accepted, so the interpolation begins at autoregressive decoding there.
    """
    if threshold >= 1 or len(thresholds) == 1:
        return at(0)
    above = max(0, bisect_right(thresholds, -threshold, key=neg) - 1)
    below = min(above + 1, len(thresholds) - 1)
    gap = thresholds[above] - thresholds[below]
    weight = (thresholds[above] - threshold) / gap if gap else 0.0
    low = at(below)
    high = at(above) if above else autoregressive(len(low.tokens_B))
    return Lookahead(*(one + weight * (other - one) for one, other in zip(high, low, strict=True)))


def _sums(values_K: Floats) -> Floats:
    return np.concatenate([[0.0], values_K.cumsum()])

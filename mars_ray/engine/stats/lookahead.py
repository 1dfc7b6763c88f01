"""Gain and cost of looking ahead: the tokens and the positions of an average forward of one sequence, by block size.

A block of size b has b - 1 masks. Letters: K masks, B = K + 1 block sizes.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import neg
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Lookahead(NamedTuple):
    """Gain and cost of an average forward of one sequence, by block size."""

    tokens_B: Floats
    """Tokens gained with blocks of 1, 2, ..., B; at least 1 each."""
    positions_B: Floats
    """Positions fed to the network: tokens, drafts and masks."""


def autoregressive(blocks: int) -> Lookahead:
    """Return the lookahead for the case that no token at a mask is accepted or drafted."""
    nothing_K = np.zeros(blocks - 1)
    return look_ahead(nothing_K, nothing_K, nothing_K)


def look_ahead(accepted_K: Floats, drafted_K: Floats, right_K: Floats, *, rows_per_draft: float = 0.0) -> Lookahead:
    """Return the lookahead of forwards that accept some tokens at masks and draft others for verification.

    `accepted_K` is the share of forwards that accept the token at the k-th mask, and `drafted_K` is the share that
    draft this token. `right_K` is the share in which this token is drafted and turns out right, along with all drafts
    before it. Each accepted token and each draft takes a position in the next forward. `rows_per_draft` is the number
    of masks that a draft adds, as a fraction of the longest row.
    """
    masks_B = np.arange(len(drafted_K) + 1)
    gained_B, drafts_B = _sums(accepted_K), _sums(drafted_K)
    return Lookahead(1 + gained_B + _sums(right_K), 1 + gained_B + drafts_B + (1 + rows_per_draft * drafts_B) * masks_B)


def interpolate(thresholds: Sequence[float], at: Callable[[int], Lookahead], threshold: float) -> Lookahead:
    """Interpolate the lookahead at `threshold` linearly between `thresholds`, which descend from 1.

    `at` returns the lookahead for an index into `thresholds`.
    """
    above = max(0, bisect_right(thresholds, -threshold, key=neg) - 1)
    below = min(above + 1, len(thresholds) - 1)
    gap = thresholds[above] - thresholds[below]
    weight = min(1.0, (thresholds[above] - threshold) / gap) if gap and threshold < thresholds[above] else 0.0
    return Lookahead(*(upper + weight * (lower - upper) for upper, lower in zip(at(above), at(below), strict=True)))


def _sums(values_K: Floats) -> Floats:
    return np.concatenate([[0.0], values_K.cumsum()])

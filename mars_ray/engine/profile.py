"""What every threshold would have given, and how often looking ahead agrees with autoregressive decoding.

In:    the confidences at the masks of each forward; for audited tokens, whether the model still agrees once it has
       seen what stands before them.
Out:   tokens per forward and agreement for each threshold of a fixed grid, as running means.
Never: costs a forward, or more than appending a list to a list in the step itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

GRID = (1.0, 0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Thresholds on the probability, falling."""

HALF_LIFE = 4096
"""After so many forwards of a sequence an observation counts half."""

CALIBRATED_FORWARDS = 32
"""Before anything is observed, at threshold 1 above all, where no mask is fed, calibration says what others would give;
a few real observations outweigh it."""

FOLD_FORWARDS = 128
"""Observations are folded into the means in batches of so many: per step they are only kept."""

Counts = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One threshold of the grid."""

    threshold: float
    survival: tuple[float, ...]
    """For each mask, the share of forwards that accept it."""
    agreement: float | None
    """Share of the tokens that autoregressive decoding would have chosen too, given what stands before them; None
    before any audit at this threshold."""
    audited: float
    """Tokens audited, old ones counting less."""

    @property
    def tokens_per_forward(self) -> float:
        """At the full block."""
        return 1.0 + sum(self.survival)


class Profile:
    """Running means over forwards at `block` proposed tokens or fewer."""

    def __init__(self, block: int, calibration: Mapping[float, float] | None = None) -> None:
        """`calibration`: tokens per forward by threshold; they count as much as `CALIBRATED_FORWARDS` observations."""
        self._block = block
        self._drafts: list[tuple[int, list[float]]] = []
        self._audits: list[tuple[list[float], list[bool]]] = []
        self._looked_K: Counts = np.zeros(block - 1)
        self._accepted_GK: Counts = np.zeros((len(GRID), block - 1))
        self._audited_G: Counts = np.zeros(len(GRID))
        self._agreed_G: Counts = np.zeros(len(GRID))
        if calibration and block > 1:
            thresholds = sorted(calibration)
            tokens_G = np.interp(GRID, thresholds, [calibration[each] for each in thresholds])
            self._looked_K += CALIBRATED_FORWARDS
            self._accepted_GK += CALIBRATED_FORWARDS * np.array([_geometric(tokens, block - 1) for tokens in tokens_G])

    @property
    def forwards(self) -> float:
        """Forwards in the means, old ones counting less."""
        return float(self._looked_K.max(initial=0))

    def observe(self, looked: int, confidences: list[float]) -> None:
        """Record one forward of one sequence: the confidences at its `looked` masks, in order.

        Where they are fewer, the sequence would have ended there at a stop token, whatever the threshold.
        """
        self._drafts.append((looked, confidences))
        if len(self._drafts) >= FOLD_FORWARDS:
            self._fold()

    def audit(self, confidences: list[float], right: list[bool]) -> None:
        """Record which tokens accepted at masks are what the model says now; behind a wrong draft none is judged.

        `confidences` are the least ones in the draft up to each.
        """
        self._audits.append((confidences, right))

    def survival(self, threshold: float) -> Counts:
        """Return, for each mask, the share of forwards that accept it, [block - 1]: the folded means, read linearly
        between thresholds of the grid."""
        share_GK = self._accepted_GK / np.maximum(self._looked_K, 1e-9)
        above = int(np.searchsorted(-np.array(GRID), -threshold, side="right")) - 1
        if above < 0 or threshold >= 1:
            return np.zeros(self._block - 1)
        below = min(above + 1, len(GRID) - 1)
        weight = (GRID[above] - threshold) / (GRID[above] - GRID[below]) if below > above else 0.0
        blended: Counts = (1 - weight) * share_GK[above] + weight * share_GK[below]
        return blended

    def tokens_per_forward(self, threshold: float) -> float:
        """Return what the threshold would give at the full block."""
        self._fold()
        return 1.0 + float(self.survival(threshold).sum())

    def points(self) -> tuple[ProfilePoint, ...]:
        """Return the curve over the grid."""
        curve = []
        for number, threshold in enumerate(GRID):
            tokens = self.tokens_per_forward(threshold)
            audited = float(self._audited_G[number])
            agreement = None
            if threshold >= 1:
                agreement = 1.0
            elif audited > 0:
                # Only what was accepted at a mask can differ: the first token of a forward is autoregressive.
                agreement = 1 - (1 - float(self._agreed_G[number]) / audited) * (tokens - 1) / tokens
            curve.append(ProfilePoint(threshold, tuple(self.survival(threshold).tolist()), agreement, audited))
        return tuple(curve)

    def _fold(self) -> None:
        if self._drafts:
            drafts, self._drafts = self._drafts, []
            keep = 0.5 ** (len(drafts) / HALF_LIFE)
            width = self._block - 1
            # What was not looked at, or stands behind the end, is below every threshold.
            sure_FK = np.array([(sure + [-1.0] * width)[:width] for _, sure in drafts])
            looked_F1 = np.array([[looked] for looked, _ in drafts])
            least_FK = np.minimum.accumulate(sure_FK, axis=1)
            grid_G11 = np.array([2.0, *GRID[1:]])[:, None, None]  # a threshold of 1 accepts no mask, however sure
            self._accepted_GK = keep * self._accepted_GK + (least_FK >= grid_G11).sum(axis=1)
            self._looked_K = keep * self._looked_K + (np.arange(width) < looked_F1).sum(axis=0)
        if self._audits:
            audits, self._audits = self._audits, []
            keep = 0.5 ** (len(audits) / HALF_LIFE)
            self._audited_G *= keep
            self._agreed_G *= keep
            grid_G1 = np.array(GRID)[:, None]
            for confidences, right in audits:
                judged = min(len(confidences), len(right))
                counts_GJ = np.array(confidences[:judged], dtype=float) >= grid_G1
                self._audited_G += counts_GJ.sum(axis=1)
                self._agreed_G += (counts_GJ & np.array(right[:judged], dtype=bool)).sum(axis=1)


def _geometric(tokens_per_forward: float, masks: int) -> Counts:
    """Return shares of accepted masks, [masks], each the same part of the one before, that add up to these tokens."""
    gained = min(max(tokens_per_forward - 1, 0.0), float(masks))
    powers_K = np.arange(1, masks + 1)
    part = brentq(lambda part: float((part**powers_K).sum()) - gained, 0.0, 1.0)
    shares: Counts = part**powers_K
    return shares

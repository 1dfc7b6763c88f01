"""Count how many drafts verification finds right, and how many their confidences had promised.

Letters: G thresholds of the grid, K masks, F observed forwards.
"""

import math

import numpy as np

from mars_ray.engine.stats.grid import GRID, decay
from mars_ray.engine.stats.lookahead import Floats

COMMON_DRAFTS = 4.0
"""The share of right drafts at one mask is estimated as if this many drafts had the mean over all masks, because the
last masks give few drafts of their own."""


class VerifiedDrafts:
    """Decayed counts of verified drafts at each mask and threshold."""

    def __init__(self, masks: int) -> None:
        self._masks = masks
        self._new: list[tuple[int, list[float], list[float], bool]] = []
        self._expected_K: Floats = np.zeros(masks)
        """Expected number of drafts, judging by confidences, that are right along with all drafts before them."""
        self.right_GK: Floats = np.zeros((len(GRID), masks))
        """Drafts that are right, or kept, along with all drafts before them."""
        self._expected_whole = 0.0
        """Verifications in which all drafts were expected to be right."""
        self._right_whole_G: Floats = np.zeros(len(GRID))
        """Verifications in which all drafts are right, or kept."""

    def observe(self, after: int, confidences: list[float], ratios: list[float], ends: bool) -> None:
        """Record verified drafts (see `Profile.observe_drafts`)."""
        self._new.append((after, confidences, ratios, ends))

    def truth(self, number: int) -> Floats:
        """Return how many drafts are right for each one expected, by mask [K], at a threshold of the grid."""
        common = (self.right_GK[number].sum() + 1) / (self._expected_K.sum() + 1)
        truth_K: Floats = (self.right_GK[number] + COMMON_DRAFTS * common) / (self._expected_K + COMMON_DRAFTS)
        return truth_K

    def truth_of_whole(self, number: int) -> float:
        """Return how many verifications find all drafts right for each one expected, at a threshold of the grid."""
        return float((self._right_whole_G[number] + 1) / (self._expected_whole + 1))

    def widen(self, masks: int) -> None:
        """Count more masks; all observations must have been folded."""
        more = masks - self._masks
        self._expected_K = np.pad(self._expected_K, (0, more))
        self.right_GK = np.pad(self.right_GK, ((0, 0), (0, more)))
        self._masks = masks

    def fold(self) -> None:
        """Add the new observations to the counts."""
        if not self._new:
            return
        new, self._new = self._new, []
        keep, masks_K = decay(len(new)), np.arange(self._masks)
        sure_FK = np.array([([1.0] * after + sure + [0.0] * self._masks)[: self._masks] for after, sure, *_ in new])
        after_F1 = np.array([[after] for after, *_ in new])
        ratio_FK = np.array(
            [([1.0] * after + ratios + [math.nan] * self._masks)[: self._masks] for after, _, ratios, _ in new]
        )
        # Drafts after one that was not kept are not judged. Where a threshold keeps that one, their confidences tell.
        grid_G11 = np.array(GRID)[:, None, None]
        kept_GFK = np.where(np.isnan(ratio_FK), sure_FK, ratio_FK >= grid_G11).cumprod(axis=2)
        # A draft that is a stop token counts as the autoregressive token of the forward that verifies it.
        end_F1 = np.array([[after + len(sure) - ends] for after, sure, _, ends in new])
        is_draft_FK = (masks_K >= after_F1) & (masks_K < end_F1)
        self._expected_K = keep * self._expected_K + (is_draft_FK * sure_FK.cumprod(axis=1)).sum(axis=0)
        self.right_GK = keep * self.right_GK + (is_draft_FK * kept_GFK).sum(axis=1)
        self._expected_whole = keep * self._expected_whole + sum(math.prod(sure) for _, sure, *_ in new)
        last_F = [min(after + len(sure), self._masks) - 1 for after, sure, *_ in new]
        self._right_whole_G = keep * self._right_whole_G + kept_GFK[:, range(len(last_F)), last_F].sum(axis=1)

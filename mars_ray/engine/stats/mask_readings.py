"""Count what forwards read at their masks: which tokens a threshold would accept, and which it would draft.

Letters: G thresholds of the grid, K masks, F observed forwards.
"""

from collections.abc import Mapping

import numpy as np

from mars_ray.engine.stats.grid import GRID, decay
from mars_ray.engine.stats.lookahead import Floats
from mars_ray.method.drafts import PositionPrice

CALIBRATED_FORWARDS = 32
"""Weight of the calibration in forwards. It is low, so that observations soon outweigh the calibration. Without a
calibration, a profile is unknown until it has observed this many forwards."""


class MaskReadings:
    """Decayed counts of forwards at each mask and threshold."""

    def __init__(self, masks: int, *, lenient: bool) -> None:
        """`lenient` says that thresholds apply to drafts (see `Acceptance`)."""
        self._masks = masks
        self.lenient = lenient
        self._new: list[tuple[int, list[float], PositionPrice, bool]] = []
        self.looked_K: Floats = np.zeros(masks)
        """Forwards whose k-th mask was read."""
        self.accepted_GK: Floats = np.zeros((len(GRID), masks))
        """Forwards in which the k-th mask and all masks before it pass the threshold."""
        self.drafted_GK: Floats = np.zeros((len(GRID), masks))
        """Forwards in which the k-th mask gives a draft, because it or a mask before it falls short."""
        self.likely_GK: Floats = np.zeros((len(GRID), masks))
        """Expected number of drafts, judging by confidences, that are right along with all drafts before them."""
        self.ended_GK: Floats = np.zeros((len(GRID), masks))
        """Expected number of forwards that read the k-th mask and whose drafts are all right and reach a stop token,
        so that one more forward without masks verifies them."""
        self.all_right_G: Floats = np.zeros(len(GRID))
        """Expected number of forwards whose drafts are all right."""
        self.drafting_G: Floats = np.zeros(len(GRID))
        """Forwards that give at least one draft."""

    @property
    def new(self) -> int:
        """Number of observations that have not been folded."""
        return len(self._new)

    @property
    def forwards(self) -> float:
        """Decayed number of forwards."""
        return float(self.looked_K.max(initial=0))

    def calibrate(self, calibration: Mapping[float, tuple[float, float]]) -> None:
        """Start from a calibration. Its tokens at masks count as right drafts at threshold 1 and with lenience, and as
        accepted elsewhere.
        """
        if not calibration or not self._masks:
            return
        calibrated = sorted((threshold, tokens) for threshold, (tokens, _) in calibration.items())
        thresholds, tokens = zip(*calibrated, strict=True)
        tokens_G = np.interp(GRID, thresholds, tokens)
        gained_GK = CALIBRATED_FORWARDS * np.array([_geometric(tokens, self._masks) for tokens in tokens_G])
        self.looked_K += CALIBRATED_FORWARDS
        drafting = len(GRID) if self.lenient else 1
        self.accepted_GK[drafting:] = gained_GK[drafting:]
        self.drafted_GK[:drafting] = gained_GK[:drafting]
        self.likely_GK[:drafting] = gained_GK[:drafting]

    def observe(self, looked: int, confidences: list[float], price: PositionPrice, ends: bool) -> None:
        """Record a forward (see `Profile.observe_masks`)."""
        self._new.append((looked, confidences, price, ends))

    def widen(self, masks: int, *, lenient: bool) -> None:
        """Count more masks; all observations must have been folded."""
        more = masks - self._masks
        self.looked_K = np.pad(self.looked_K, (0, more))
        self.accepted_GK, self.drafted_GK, self.likely_GK, self.ended_GK = (
            np.pad(counts_GK, ((0, 0), (0, more)))
            for counts_GK in (self.accepted_GK, self.drafted_GK, self.likely_GK, self.ended_GK)
        )
        self._masks = masks
        self.lenient = lenient

    def fold(self) -> None:
        """Add the new observations to the counts."""
        if not self._new:
            return
        new, self._new = self._new, []
        keep, masks_K = decay(len(new)), np.arange(self._masks)
        # Masks that were not fed, or that follow a stop token, count as below every threshold.
        sure_FK = np.array([(sure + [-1.0] * self._masks)[: self._masks] for _, sure, *_ in new])
        looked_FK = masks_K < np.array([[looked] for looked, *_ in new])
        prices = {price: [*map(price.of_draft, range(self._masks))] for price in {price for _, _, price, _ in new}}
        price_FK = np.array([prices[price] for _, _, price, _ in new])
        last_FK = masks_K == np.array([[len(sure) - 1 if ends else self._masks] for _, sure, _, ends in new])
        # No confidence reaches 2, so threshold 1 accepts nothing, and lenience never does.
        grid_G11 = np.array([2.0] * len(GRID) if self.lenient else [2.0, *GRID[1:]])[:, None, None]
        accepted_GFK = np.minimum.accumulate(sure_FK, axis=1) >= grid_G11
        right_GFK = np.where(accepted_GFK, 1.0, sure_FK.clip(0)).cumprod(axis=2)
        # Drafting stops at the first draft whose probability of being right is below the price. A draft that is a stop
        # token counts as the autoregressive token of the last forward.
        number_GFK = (masks_K - accepted_GFK.sum(axis=2, keepdims=True)).clip(0)
        price_GFK = np.take_along_axis(price_FK[None], number_GFK, axis=2)
        reaches_GFK = ~accepted_GFK & (right_GFK >= price_GFK) & (sure_FK >= 0)
        drafted_GFK = reaches_GFK & ~last_FK
        all_right_GFK = right_GFK * (reaches_GFK & ~np.pad(reaches_GFK[..., 1:], ((0, 0), (0, 0), (0, 1))))
        for counts, observed in (
            (self.looked_K, looked_FK.sum(axis=0)),
            (self.accepted_GK, accepted_GFK.sum(axis=1)),
            (self.drafted_GK, drafted_GFK.sum(axis=1)),
            (self.likely_GK, (drafted_GFK * right_GFK).sum(axis=1)),
            (self.ended_GK, (all_right_GFK * last_FK).sum(axis=2) @ looked_FK.astype(int)),
            (self.all_right_G, all_right_GFK.sum(axis=(1, 2))),
            (self.drafting_G, reaches_GFK.any(axis=2).sum(axis=1)),
        ):
            counts *= keep
            counts += observed


def _geometric(tokens_per_forward: float, masks: int) -> Floats:
    """Return acceptance shares [masks] that form a geometric series with the sum `tokens_per_forward` - 1."""
    from scipy.optimize import brentq  # takes half a second, and gateways, decoders and controllers do not need it

    gained = min(max(tokens_per_forward - 1, 0.0), float(masks))
    powers_K = np.arange(1, masks + 1)
    part = brentq(lambda part: float((part**powers_K).sum()) - gained, 0.0, 1.0)
    shares: Floats = part**powers_K
    return shares

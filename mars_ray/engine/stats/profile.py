"""Estimate the tokens per forward and the agreement of every threshold from what the engine observes.

Three observations are used: confidences at masks, which drafts verification accepted, and audits. An audit compares
tokens accepted at masks with the model's choice one forward later. No extra forward is needed, and a step only appends
its observations to lists.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from mars_ray.engine.stats.lookahead import Lookahead, interpolate, trusted, verified

GRID = (1.0, 0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Thresholds on the probability. At 1 drafts are verified."""

HALF_LIFE = 4096
"""Forwards after which the weight of an observation has halved."""

CALIBRATED_FORWARDS = 32
"""Weight of the calibration in forwards; a few observations outweigh it."""

KEEP_ROWS = 0.5 ** (1 / 1024)
"""Decay per forward of the observed rows of masks, whose layout changes with the load."""

FOLD_FORWARDS = 128
"""Forwards whose observations are folded into the means together."""

CALIBRATED_DRAFTS = 0.7
"""Calibrated threshold that stands in for drafts until some have been verified."""

COMMON_DRAFTS = 4.0
"""Weight, in drafts, of the mean over all masks as a prior for the share of right drafts at one mask. The last masks
give few drafts."""

Counts = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """Gain, cost and agreement at one threshold of the grid."""

    threshold: float
    tokens: tuple[float, ...]
    """Tokens gained in a mean forward of one sequence with blocks of 1, 2, ... up to the full block."""
    positions: tuple[float, ...]
    """Positions in that forward, for the same blocks."""
    agreement: float | None = None
    """Share of the tokens that autoregressive decoding would choose after the same prefix; None before the first audit
    at this threshold."""
    audited: float = 0.0
    """Decayed number of audited tokens."""

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per forward with the full block."""
        return self.tokens[-1]

    @property
    def lookahead(self) -> Lookahead:
        """`tokens` and `positions` as arrays."""
        return Lookahead(np.array(self.tokens), np.array(self.positions))


class Profile:
    """Decayed means over the forwards of an engine whose full block is `block`."""

    def __init__(self, block: int, calibration: Mapping[float, tuple[float, float]] | None = None) -> None:
        """`calibration`: tokens per forward and agreement by threshold, with the weight `CALIBRATED_FORWARDS`."""
        masks = block - 1
        self._masks = masks
        self._looks: list[tuple[int, list[float], int, bool, bool]] = []
        self._audits: list[tuple[float, list[float], list[bool]]] = []
        self._verified: list[tuple[list[float], int]] = []
        self._looked_K: Counts = np.zeros(masks)
        self._accepted_GK: Counts = np.zeros((len(GRID), masks))
        self._verifying_K: Counts = np.zeros(masks)
        """Forwards if drafts were verified. Verification adds one at the end of a sequence, and one where the last
        right draft has no masks behind it."""
        self._drafted_K: Counts = np.zeros(masks)
        """Forwards of `_verifying_K` whose k-th mask gives a draft."""
        self._likely_K: Counts = np.zeros(masks)
        """Expected number of those drafts that are right together with all before them, by their confidences."""
        self._expected_K: Counts = np.zeros(masks)
        """`_likely_K` of the drafts that were verified."""
        self._right_K: Counts = np.zeros(masks)
        """Verified drafts that were right together with all before them."""
        self._fed = float(CALIBRATED_FORWARDS)
        """Forwards with masks where drafts are verified."""
        self._rows = float(CALIBRATED_FORWARDS)
        """Sum over those forwards of all masks divided by the longest row."""
        self._void = 0
        """Forwards since the last fold that had no masks behind the last right draft."""
        self._audited_G: Counts = np.zeros(len(GRID))
        self._agreed_G: Counts = np.zeros(len(GRID))
        if calibration and masks:
            self._begin(sorted((threshold, *point) for threshold, point in calibration.items() if threshold < 1))

    def _begin(self, calibrated: list[tuple[float, float, float]]) -> None:
        if not calibrated:
            return
        thresholds, tokens, agreements = zip(*calibrated, strict=True)
        # Just below 1 no token is accepted.
        tokens_G = np.interp(GRID, (*thresholds, 1.0), (*tokens, 1.0))
        self._looked_K += CALIBRATED_FORWARDS
        self._accepted_GK += CALIBRATED_FORWARDS * np.array([_geometric(tokens, self._masks) for tokens in tokens_G])
        drafted = GRID.index(CALIBRATED_DRAFTS)
        self._verifying_K += CALIBRATED_FORWARDS
        self._drafted_K += self._accepted_GK[drafted]
        ahead = tokens_G[drafted] - 1
        wrong = (1 - float(np.interp(CALIBRATED_DRAFTS, thresholds, agreements))) * tokens_G[drafted]
        right = max(0.0, 1 - (wrong / ahead if ahead > 0 else 1.0))
        self._likely_K += self._drafted_K * right ** np.arange(1, self._masks + 1)

    @property
    def forwards(self) -> float:
        """Decayed number of observed forwards."""
        return float(self._looked_K.max(initial=0))

    def observe_masks(
        self, looked: int, confidences: list[float], drafted: int, *, ended: bool = False, surprised: bool = False
    ) -> None:
        """Record the confidences at the `looked` masks of one sequence in one forward, in order.

        There are fewer confidences than masks if the sequence would end at a stop token before. `drafted` masks would
        give drafts; with `ended` the drafts reach the stop token, so one more forward verifies them. With `surprised`
        the masks follow a wrong draft. Such forwards also represent those that had no masks to read.
        """
        self._looks.append((looked, confidences, drafted, ended, surprised))
        if len(self._looks) >= FOLD_FORWARDS:
            self._fold()

    def observe_drafts(self, confidences: list[float], right: int) -> None:
        """Record the confidences of drafts made at a threshold of 1; the first `right` were right."""
        self._verified.append((confidences, right))

    def observe_rows(self, masks: tuple[int, ...], read: bool) -> None:
        """Record the rows of masks in a verifying forward, and whether the row to `read` had any."""
        if longest := max(masks):
            self._fed = KEEP_ROWS * self._fed + 1
            self._rows = KEEP_ROWS * self._rows + sum(masks) / longest
            self._void += not read

    def observe_audit(self, threshold: float, confidences: list[float], right: list[bool]) -> None:
        """Record which tokens accepted at masks the model agrees with one forward later.

        Tokens behind a wrong draft are not judged. `confidences` are those at acceptance; they inform thresholds from
        `threshold` up.
        """
        self._audits.append((threshold, confidences, right))

    def lookahead(self, threshold: float) -> Lookahead:
        """Return gain and cost of a threshold by block, interpolated linearly over the grid."""
        return interpolate(GRID, self._at, threshold)

    def worth_of_masks(self, price: float) -> list[float]:
        """Return the expected tokens gained by the k-th mask where drafts are verified, less the price of verification.

        A position costs `price` tokens.
        """
        drafted_K, right_K = self._drafts()
        worth_K: list[float] = (right_K - price * drafted_K).tolist()
        return worth_K

    def points(self) -> tuple[ProfilePoint, ...]:
        """Fold all observations and return the curve over the grid."""
        self._fold()
        curve = []
        for number, threshold in enumerate(GRID):
            lookahead = self._at(number)
            tokens = float(lookahead.tokens_B[-1])
            audited = float(self._audited_G[number])
            agreement = None
            if threshold >= 1:
                agreement = 1.0
            elif audited > 0:
                # The first token of a forward is autoregressive and always agrees.
                agreement = 1 - (1 - float(self._agreed_G[number]) / audited) * (tokens - 1) / tokens
            by_block = tuple(lookahead.tokens_B.tolist()), tuple(lookahead.positions_B.tolist())
            curve.append(ProfilePoint(threshold, *by_block, agreement, audited))
        return tuple(curve)

    def _at(self, number: int) -> Lookahead:
        if number:
            return trusted(self._accepted_GK[number] / np.maximum(self._looked_K, 1e-9))
        return verified(*self._drafts(), rows=self._rows / self._fed)

    def _drafts(self) -> tuple[Counts, Counts]:
        """Return the shares of forwards whose k-th mask gives a draft, and a draft that is right with all before it."""
        common = (self._right_K.sum() + 1) / (self._expected_K.sum() + 1)
        truth_K = (self._right_K + COMMON_DRAFTS * common) / (self._expected_K + COMMON_DRAFTS)
        forwards_K = np.maximum(self._verifying_K, 1e-9)
        drafted_K = self._drafted_K / forwards_K
        return drafted_K, np.minimum(self._likely_K / forwards_K * truth_K, drafted_K)

    def _fold(self) -> None:
        if self._looks:
            self._fold_looks()
        if self._verified:
            self._fold_verified()
        if self._audits:
            self._fold_audits()

    def _fold_looks(self) -> None:
        looks, self._looks = self._looks, []
        keep, masks_K = 0.5 ** (len(looks) / HALF_LIFE), np.arange(self._masks)
        # Masks that were not fed, or follow the end, count as below every threshold.
        sure_FK = np.array([(sure + [-1.0] * self._masks)[: self._masks] for _, sure, *_ in looks])
        looked_F1, drafted_F1, ended_F1, surprised_F1 = (
            np.array([[look[part]] for look in looks]) for part in (0, 2, 3, 4)
        )
        stands_for_F1 = 1 + surprised_F1 * self._void / max(1, surprised_F1.sum())
        least_FK = np.minimum.accumulate(sure_FK, axis=1)
        grid_G11 = np.array([2.0, *GRID[1:]])[:, None, None]  # at 1 no token is trusted
        self._accepted_GK = keep * self._accepted_GK + ((least_FK >= grid_G11) * stands_for_F1).sum(axis=1)
        looked_FK = masks_K < looked_F1
        self._looked_K = keep * self._looked_K + (looked_FK * stands_for_F1).sum(axis=0)
        self._verifying_K = keep * self._verifying_K + looked_FK.sum(axis=0) + (looked_FK & ended_F1).sum(axis=0)
        self._verifying_K += self._void
        self._void = 0
        is_draft_FK = masks_K < drafted_F1
        self._drafted_K = keep * self._drafted_K + is_draft_FK.sum(axis=0)
        self._likely_K = keep * self._likely_K + (is_draft_FK * sure_FK.cumprod(axis=1)).sum(axis=0)

    def _fold_verified(self) -> None:
        verified, self._verified = self._verified, []
        keep, masks_K = 0.5 ** (len(verified) / HALF_LIFE), np.arange(self._masks)
        sure_FK = np.array([(sure + [0.0] * self._masks)[: self._masks] for sure, _ in verified])
        right_F1 = np.array([[right] for _, right in verified])
        self._expected_K = keep * self._expected_K + sure_FK.cumprod(axis=1).sum(axis=0)
        self._right_K = keep * self._right_K + (masks_K < right_F1).sum(axis=0)

    def _fold_audits(self) -> None:
        audits, self._audits = self._audits, []
        keep = 0.5 ** (len(audits) / HALF_LIFE)
        self._audited_G *= keep
        self._agreed_G *= keep
        grid_G1 = np.array(GRID)[:, None]
        for threshold, confidences, right in audits:
            judged = min(len(confidences), len(right))
            least_J = np.minimum.accumulate(np.array(confidences[:judged], dtype=float))
            counts_GJ = (least_J >= grid_G1) & (grid_G1 >= threshold)
            self._audited_G += counts_GJ.sum(axis=1)
            self._agreed_G += (counts_GJ & np.array(right[:judged], dtype=bool)).sum(axis=1)


def _geometric(tokens_per_forward: float, masks: int) -> Counts:
    """Return a geometric series of acceptance shares, [masks], whose sum is `tokens_per_forward` - 1."""
    gained = min(max(tokens_per_forward - 1, 0.0), float(masks))
    powers_K = np.arange(1, masks + 1)
    part = brentq(lambda part: float((part**powers_K).sum()) - gained, 0.0, 1.0)
    shares: Counts = part**powers_K
    return shares

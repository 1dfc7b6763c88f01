"""What every threshold would have given, and how often looking ahead agrees with autoregressive decoding.

Learned from the confidences at the masks of each forward, from which drafts were right, and from audits: whether the
model still agrees with accepted tokens once it has seen what stands before them. It costs no forward, and in the step
itself no more than appending a list to a list.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from mars_ray.engine.stats.lookahead import Lookahead, between, trusted, verified

GRID = (1.0, 0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Thresholds on the probability, falling from 1, at which drafts are verified."""

HALF_LIFE = 4096
"""Forwards after which an observation counts half."""

CALIBRATED_FORWARDS = 32
"""Before anything is observed calibration says what thresholds give; a few real observations outweigh it."""

KEEP_ROWS = 0.5 ** (1 / 1024)
"""What rows of masks count against those of the next forward: how they are laid out changes with the load."""

FOLD_FORWARDS = 128
"""Observations are folded into the means in batches of so many; in a step they are only appended."""

CALIBRATED_DRAFTS = 0.7
"""Calibration of this threshold says what drafts give before any are verified."""

COMMON_DRAFTS = 4.0
"""How far confidences of one mask can be believed starts from the mean of all masks, as if from so many drafts: the
last masks see few."""

Counts = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One threshold of the grid."""

    threshold: float
    tokens: tuple[float, ...]
    """Tokens a sequence gains in a mean forward with blocks of 1, 2, ... up to the full one."""
    positions: tuple[float, ...]
    """Positions of the sequence in that forward."""
    agreement: float | None
    """Share of the tokens that autoregressive decoding would have chosen too, given what stands before them; None
    before any audit at this threshold."""
    audited: float
    """Tokens audited, old ones counting less."""

    @property
    def tokens_per_forward(self) -> float:
        """Tokens a forward gives at the full block."""
        return self.tokens[-1]

    @property
    def lookahead(self) -> Lookahead:
        """Tokens and positions as arrays."""
        return Lookahead(np.array(self.tokens), np.array(self.positions))


class Profile:
    """Running means over forwards that propose `block` tokens or fewer."""

    def __init__(self, block: int, calibration: Mapping[float, tuple[float, float]] | None = None) -> None:
        """`calibration`: tokens per forward and agreement by threshold, as if from `CALIBRATED_FORWARDS` forwards."""
        masks = block - 1
        self._masks = masks
        self._looks: list[tuple[int, list[float], int, bool, bool]] = []
        self._audits: list[tuple[float, list[float], list[bool]]] = []
        self._verified: list[tuple[list[float], int]] = []
        self._looked_K: Counts = np.zeros(masks)
        self._accepted_GK: Counts = np.zeros((len(GRID), masks))
        self._verifying_K: Counts = np.zeros(masks)
        """Forwards there would be if drafts were verified, which takes one more at the end and where there are no masks
        to read; `_drafted_K` of them give a draft."""
        self._drafted_K: Counts = np.zeros(masks)
        self._likely_K: Counts = np.zeros(masks)
        """How many of those drafts should be right by their confidences, with all before them."""
        self._expected_K: Counts = np.zeros(masks)
        """The same of drafts that were verified; `_right_K` of them were right."""
        self._right_K: Counts = np.zeros(masks)
        self._fed, self._rows = (float(CALIBRATED_FORWARDS),) * 2
        """Where drafts are verified: forwards with masks, and these masks as multiples of the longest row."""
        self._void = 0
        """Forwards, not folded yet, with no masks behind the last right draft."""
        self._audited_G: Counts = np.zeros(len(GRID))
        self._agreed_G: Counts = np.zeros(len(GRID))
        if calibration and masks:
            self._begin(sorted((threshold, *found) for threshold, found in calibration.items() if threshold < 1))

    def _begin(self, calibrated: list[tuple[float, float, float]]) -> None:
        if not calibrated:
            return
        thresholds, tokens, agreements = zip(*calibrated, strict=True)
        # Just below 1 nothing is accepted, and all agrees.
        tokens_G = np.interp(GRID, (*thresholds, 1.0), (*tokens, 1.0))
        self._looked_K += CALIBRATED_FORWARDS
        self._accepted_GK += CALIBRATED_FORWARDS * np.array([_geometric(each, self._masks) for each in tokens_G])
        drafted = GRID.index(CALIBRATED_DRAFTS)
        self._verifying_K += CALIBRATED_FORWARDS
        self._drafted_K += self._accepted_GK[drafted]
        ahead = tokens_G[drafted] - 1
        wrong = (1 - float(np.interp(CALIBRATED_DRAFTS, thresholds, agreements))) * tokens_G[drafted]
        right = max(0.0, 1 - (wrong / ahead if ahead > 0 else 1.0))
        self._likely_K += self._drafted_K * right ** np.arange(1, self._masks + 1)

    @property
    def forwards(self) -> float:
        """Forwards in the means, old ones counting less."""
        return float(self._looked_K.max(initial=0))

    def observe_masks(
        self, looked: int, confidences: list[float], drafted: int, *, ended: bool = False, surprised: bool = False
    ) -> None:
        """Record one forward of one sequence: the confidences at its `looked` masks, in order.

        Where they are fewer, the sequence would have ended there at a stop token, whatever the threshold. `drafted` of
        them give drafts where drafts are verified; `ended` tells that these reach the stop token, so that all that is
        left to do then is to verify them. `surprised` tells that the masks stand behind a wrong draft: such forwards
        stand for those, too, that had no masks to read.
        """
        self._looks.append((looked, confidences, drafted, ended, surprised))
        if len(self._looks) >= FOLD_FORWARDS:
            self._fold()

    def observe_drafts(self, confidences: list[float], right: int) -> None:
        """Record drafts made as at a threshold of 1, of which the first `right` were right when verified."""
        self._verified.append((confidences, right))

    def observe_rows(self, masks: tuple[int, ...], read: bool) -> None:
        """Record the rows of masks of a forward that verified drafts, and whether the row to read had any."""
        if longest := max(masks):
            self._fed = KEEP_ROWS * self._fed + 1
            self._rows = KEEP_ROWS * self._rows + sum(masks) / longest
            self._void += not read

    def observe_audit(self, threshold: float, confidences: list[float], right: list[bool]) -> None:
        """Record which tokens accepted at masks are what the model says now; behind a wrong draft none is judged.

        The `confidences` they were accepted with say nothing of thresholds below the one that they passed.
        """
        self._audits.append((threshold, confidences, right))

    def lookahead(self, threshold: float) -> Lookahead:
        """Return what the threshold gives by block: the folded means, read linearly between thresholds of the grid."""
        return between(GRID, self._at, threshold)

    def worth_of_masks(self, price: float) -> list[float]:
        """Return the tokens that the k-th mask gives whose draft is verified, less what verifying takes.

        A position costs `price` tokens.
        """
        drafted_K, right_K = self._drafts()
        worth_K: list[float] = (right_K - price * drafted_K).tolist()
        return worth_K

    def points(self) -> tuple[ProfilePoint, ...]:
        """Return the curve over the grid."""
        self._fold()
        curve = []
        for number, threshold in enumerate(GRID):
            found = self._at(number)
            tokens = float(found.tokens_B[-1])
            audited = float(self._audited_G[number])
            agreement = None
            if threshold >= 1:
                agreement = 1.0
            elif audited > 0:
                # Only what was accepted at a mask can differ: the first token of a forward is autoregressive.
                agreement = 1 - (1 - float(self._agreed_G[number]) / audited) * (tokens - 1) / tokens
            by_block = tuple(found.tokens_B.tolist()), tuple(found.positions_B.tolist())
            curve.append(ProfilePoint(threshold, *by_block, agreement, audited))
        return tuple(curve)

    def _at(self, number: int) -> Lookahead:
        if number:
            return trusted(self._accepted_GK[number] / np.maximum(self._looked_K, 1e-9))
        return verified(*self._drafts(), rows=self._rows / self._fed)

    def _drafts(self) -> tuple[Counts, Counts]:
        """Return the shares of forwards whose k-th mask gives a draft, and one that is right with all before it."""
        common = (self._right_K.sum() + 1) / (self._expected_K.sum() + 1)
        truth_K = (self._right_K + COMMON_DRAFTS * common) / (self._expected_K + COMMON_DRAFTS)
        drafted_K, likely_K = (each / np.maximum(self._verifying_K, 1e-9) for each in (self._drafted_K, self._likely_K))
        return drafted_K, np.minimum(likely_K * truth_K, drafted_K)

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
        # What was not looked at, or stands behind the end, is below every threshold.
        sure_FK = np.array([(sure + [-1.0] * self._masks)[: self._masks] for _, sure, *_ in looks])
        looked_F1, drafted_F1, ended_F1, surprised_F1 = (
            np.array([[each[part]] for each in looks]) for part in (0, 2, 3, 4)
        )
        stands_for_F1 = 1 + surprised_F1 * self._void / max(1, surprised_F1.sum())
        least_FK = np.minimum.accumulate(sure_FK, axis=1)
        grid_G11 = np.array([2.0, *GRID[1:]])[:, None, None]  # at the first none is trusted, however sure
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
    """Return shares of accepted masks, [masks], each the same part of the one before, that add up to these tokens."""
    gained = min(max(tokens_per_forward - 1, 0.0), float(masks))
    powers_K = np.arange(1, masks + 1)
    part = brentq(lambda part: float((part**powers_K).sum()) - gained, 0.0, 1.0)
    shares: Counts = part**powers_K
    return shares

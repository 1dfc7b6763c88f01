"""Estimate the tokens per forward and the agreement of every threshold from the observations of an engine.

Four kinds of observations are used: confidences at masks, outcomes of verification, audits, and the gain from text. An
audit compares tokens accepted at masks with the model's own choice one forward later. Observing needs no extra forward,
and a step only appends its observations to lists.

A block of size b has b - 1 masks. Letters: G thresholds of the grid, K masks, B = K + 1 block sizes, F observed
forwards.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul, neg
from typing import Annotated

import numpy as np

from mars_ray.engine.stats.lookahead import Floats, Lookahead, interpolate, look_ahead
from mars_ray.method.drafts import DRAFT_POSITIONS, PositionPrice

GRID = (1.0, 0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
"""Thresholds on the probability. At 1 only the model's own choices are kept."""

HALF_LIFE = 4096
"""Number of forwards after which the weight of an observation has halved."""

CALIBRATED_FORWARDS = 32
"""Weight of the calibration in forwards. It is low, so that observations soon outweigh the calibration. Without a
calibration, a profile is unknown until it has observed this many forwards."""

KEEP_ROWS = 0.5 ** (1 / 1024)
"""Factor by which a new observation of the layout of mask rows, or of the gain from text, decays the earlier ones. Both
change with load."""

FOLD_FORWARDS = 128
"""Number of forwards whose observations are added to the means in one go, once the profile is not unknown."""

COMMON_DRAFTS = 4.0
"""The share of right drafts at one mask is estimated as if this many drafts had the mean over all masks, because the
last masks give few drafts of their own."""

Share = Annotated[float, "from 0 to 1"]
"""A share of something, which is at most 1."""


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """Gain, cost and agreement at one threshold of the grid."""

    threshold: Share
    tokens: tuple[float, ...]
    """Tokens gained in an average forward of one sequence with blocks of 1, 2, ... up to the full block."""
    positions: tuple[float, ...]
    """Positions that such a forward uses, by block."""
    agreement: Share | None = None
    """Share of the tokens that autoregressive decoding would also choose after the same prefix; None before the first
    audit at this threshold."""
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

    def __init__(
        self, block: int, calibration: Mapping[float, tuple[float, float]] | None = None, *, lenient: bool = False
    ) -> None:
        """Start from `calibration` as a prior: the tokens per forward and the agreement at each threshold.

        `lenient` says that thresholds apply to drafts (see `Acceptance`).
        """
        masks = block - 1
        self._masks = masks
        self._lenient = lenient
        self._looks: list[tuple[int, list[float], PositionPrice, bool]] = []
        self._audits: list[tuple[float, list[float], list[bool]]] = []
        self._verified: list[tuple[int, list[float], list[float], bool]] = []
        self._looked_K: Floats = np.zeros(masks)
        """Forwards whose k-th mask was read."""
        self._accepted_GK: Floats = np.zeros((len(GRID), masks))
        """Forwards in which the k-th mask and all masks before it pass the threshold."""
        self._drafted_GK: Floats = np.zeros((len(GRID), masks))
        """Forwards in which the k-th mask gives a draft, because it or a mask before it falls short."""
        self._likely_GK: Floats = np.zeros((len(GRID), masks))
        """Expected number of drafts, judging by confidences, that are right along with all drafts before them."""
        self._ended_GK: Floats = np.zeros((len(GRID), masks))
        """Expected number of forwards that read the k-th mask and whose drafts are all right and reach a stop token,
        so that one more forward without masks verifies them."""
        self._all_right_G: Floats = np.zeros(len(GRID))
        """Expected number of forwards whose drafts are all right."""
        self._drafting_G: Floats = np.zeros(len(GRID))
        """Forwards that give at least one draft."""
        self._expected_K: Floats = np.zeros(masks)
        """Expected number of right drafts, like `_likely_GK`, among the drafts that were verified."""
        self._right_GK: Floats = np.zeros((len(GRID), masks))
        """Verified drafts that are right, or kept, along with all drafts before them."""
        self._expected_whole = 0.0
        """Verifications in which all drafts were expected to be right."""
        self._right_whole_G: Floats = np.zeros(len(GRID))
        """Verifications in which all drafts are right, or kept."""
        self._surprised = self._void = 0.0
        """Forwards that found a wrong draft, and how many of these had no masks after the last right draft."""
        self._drafts = self._rows = 0.0
        """Verified drafts, and the masks that they added, the latter as fractions of the longest row."""
        self._text_forwards = 0.0
        """Forwards whose drafts could come from text."""
        self._text_2, self._replaced_2 = np.zeros(2), np.zeros(2)
        """Tokens gained and positions taken by drafts from text, and by the drafts from masks that they replaced."""
        self._audited_G: Floats = np.zeros(len(GRID))
        self._agreed_G: Floats = np.zeros(len(GRID))
        self._begin(calibration or {})

    @property
    def block(self) -> int:
        """Largest block that is observed."""
        return self._masks + 1

    @property
    def lenient(self) -> bool:
        """Whether thresholds apply to drafts."""
        return self._lenient

    def widen(self, block: int, calibration: Mapping[float, tuple[float, float]], *, lenient: bool) -> None:
        """Observe blocks of up to `block` tokens, too. A profile without observations starts from `calibration`."""
        if block > self.block:
            self._fold()
            self._lenient = lenient
            more = block - self.block
            self._looked_K, self._expected_K = (
                np.pad(counts_K, (0, more)) for counts_K in (self._looked_K, self._expected_K)
            )
            self._accepted_GK, self._drafted_GK, self._likely_GK, self._ended_GK, self._right_GK = (
                np.pad(counts_GK, ((0, 0), (0, more)))
                for counts_GK in (self._accepted_GK, self._drafted_GK, self._likely_GK, self._ended_GK, self._right_GK)
            )
            self._masks = block - 1
        if not self.forwards and not self._looks:
            self._begin(calibration)

    def forget(self, calibration: Mapping[float, tuple[float, float]]) -> None:
        """Forget all observations and start again from `calibration`."""
        Profile.__init__(self, self.block, calibration, lenient=self._lenient)

    def _begin(self, calibration: Mapping[float, tuple[float, float]]) -> None:
        """Start from a calibration. Its tokens at masks count as right drafts at threshold 1 and with lenience, and as
        accepted elsewhere.
        """
        if not calibration or not self._masks:
            return
        calibrated = sorted((threshold, tokens) for threshold, (tokens, _) in calibration.items())
        thresholds, tokens = zip(*calibrated, strict=True)
        tokens_G = np.interp(GRID, thresholds, tokens)
        gained_GK = CALIBRATED_FORWARDS * np.array([_geometric(tokens, self._masks) for tokens in tokens_G])
        self._looked_K += CALIBRATED_FORWARDS
        drafting = len(GRID) if self._lenient else 1
        self._accepted_GK[drafting:] = gained_GK[drafting:]
        self._drafted_GK[:drafting] = gained_GK[:drafting]
        self._likely_GK[:drafting] = gained_GK[:drafting]

    @property
    def forwards(self) -> float:
        """Decayed number of observed forwards."""
        return float(self._looked_K.max(initial=0))

    @property
    def unknown(self) -> bool:
        """Whether too few forwards have been observed, without a calibration."""
        return self.forwards < CALIBRATED_FORWARDS

    def observe_masks(self, looked: int, confidences: list[float], price: PositionPrice, *, ends: bool = False) -> None:
        """Record a forward of one sequence that read `looked` masks, with the confidences at the first of them.

        Tokens are drafted while they are worth their `price` (see `sampling/verify`). `ends` means that a stop token
        ends the sequence. In that case `confidences` ends with the stop token, and is empty if the stop token is the
        autoregressive token.
        """
        self._looks.append((looked, confidences, price, ends))
        looks = len(self._looks)
        if looks >= FOLD_FORWARDS or (looks >= CALIBRATED_FORWARDS and self.unknown):
            self._fold()

    def observe_drafts(
        self, confidences: list[float], ratios: list[float], *, after: int = 0, ends: bool = False
    ) -> None:
        """Record verified drafts that follow `after` accepted tokens at masks.

        `ratios` are those of the drafts up to the first that was not kept: 1 for a right one (see `Verification`).
        `ends` means that the last draft is a stop token.
        """
        self._verified.append((after, confidences, ratios, ends))

    def observe_rows(self, masks: tuple[int, ...], *, read: bool, surprised: bool) -> None:
        """Record the lengths of a forward's mask rows, whether a row was read, and whether a draft was wrong."""
        if drafts := len(masks) - 1:
            self._drafts = KEEP_ROWS * self._drafts + drafts
            self._rows = KEEP_ROWS * self._rows + (sum(masks) / max(masks) - 1)
        if surprised:
            self._surprised = KEEP_ROWS * self._surprised + 1
            self._void = KEEP_ROWS * self._void + (not read)

    def observe_text(self, drafts: int, right: int, replaced: Sequence[float]) -> None:
        """Record a forward with `drafts` drafts from text, perhaps 0, of which the first `right` were right.

        `replaced` are the probabilities of the drafts from masks that the text replaced.
        """
        self._text_forwards = KEEP_ROWS * self._text_forwards + 1
        self._text_2 = KEEP_ROWS * self._text_2 + (right, drafts)
        self._replaced_2 = KEEP_ROWS * self._replaced_2 + (sum(accumulate(replaced, mul)), len(replaced))

    def observe_audit(self, threshold: float, confidences: list[float], right: list[bool]) -> None:
        """Record which tokens kept because of the threshold are `right`, i.e. equal the model's own choice.

        Tokens after a wrong draft are not judged. `confidences` were measured at acceptance; for drafts kept by
        lenience they are the ratios. The audit counts for `threshold` and all higher thresholds.
        """
        self._audits.append((threshold, confidences, right))

    def lookahead(self, threshold: float) -> Lookahead:
        """Return the gain and the cost of each block at a threshold, interpolated linearly over the grid."""
        return interpolate(GRID, self._at, threshold)

    def worth_of_masks(self, threshold: float, price: PositionPrice) -> list[float]:
        """Return the expected gain in tokens from each mask, less the cost of the positions that verify drafts."""
        number = max(0, bisect_right(GRID, -threshold, key=neg) - 1)
        accepted_K, drafted_K, right_K = self._shares(number)
        price_K = [price.of_position(DRAFT_POSITIONS * mask) for mask in range(self._masks)]
        worth_K: list[float] = (accepted_K + right_K - price_K * drafted_K).tolist()
        return worth_K

    def points(self) -> tuple[ProfilePoint, ...]:
        """Fold all observations and return the profile over the grid."""
        self._fold()
        curve = []
        for number, threshold in enumerate(GRID):
            lookahead = self._at(number)
            tokens = float(lookahead.tokens_B[-1])
            # Without lenience tokens from text are the model's own choice, as is the first token of a forward.
            ahead = (tokens if self._lenient else float(self._masks_at(number).tokens_B[-1])) - 1
            audited = float(self._audited_G[number])
            agreement = None
            if threshold >= 1:
                agreement = 1.0
            elif audited > 0:
                agreement = 1 - (1 - float(self._agreed_G[number]) / audited) * ahead / tokens
            by_block = tuple(lookahead.tokens_B.tolist()), tuple(lookahead.positions_B.tolist())
            curve.append(ProfilePoint(threshold, *by_block, agreement, audited))
        return tuple(curve)

    def _at(self, number: int) -> Lookahead:
        ahead = self._masks_at(number)
        text_2, replaced_2 = (gain_2 / max(1.0, self._text_forwards) for gain_2 in (self._text_2, self._replaced_2))
        # Without masks there are no drafts from masks to replace.
        text_2B = text_2[:, None] - np.outer(replaced_2, np.arange(self.block) > 0)
        return Lookahead(ahead.tokens_B + text_2B[0], ahead.positions_B + text_2B[1])

    def _masks_at(self, number: int) -> Lookahead:
        return look_ahead(*self._shares(number), rows_per_draft=self._rows / self._drafts if self._drafts else 0.0)

    def _shares(self, number: int) -> tuple[Floats, Floats, Floats]:
        """Return the shares of forwards that accept, draft, and draft correctly at each mask (see `look_ahead`)."""
        common = (self._right_GK[number].sum() + 1) / (self._expected_K.sum() + 1)
        truth_K = (self._right_GK[number] + COMMON_DRAFTS * common) / (self._expected_K + COMMON_DRAFTS)
        whole = (self._right_whole_G[number] + 1) / (self._expected_whole + 1)
        surprises = max(0.0, self._drafting_G[number] - whole * self._all_right_G[number])
        void = surprises * (self._void / self._surprised if self._surprised else 0.0)
        forwards_K = np.maximum(self._looked_K + whole * self._ended_GK[number] + void, 1e-9)
        drafted_K = self._drafted_GK[number] / forwards_K
        right_K = np.minimum(self._likely_GK[number] / forwards_K * truth_K, drafted_K)
        return self._accepted_GK[number] / forwards_K, drafted_K, right_K

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
        # Masks that were not fed, or that follow a stop token, count as below every threshold.
        sure_FK = np.array([(sure + [-1.0] * self._masks)[: self._masks] for _, sure, *_ in looks])
        looked_FK = masks_K < np.array([[looked] for looked, *_ in looks])
        prices = {price: [*map(price.of_draft, range(self._masks))] for price in {price for _, _, price, _ in looks}}
        price_FK = np.array([prices[price] for _, _, price, _ in looks])
        last_FK = masks_K == np.array([[len(sure) - 1 if ends else self._masks] for _, sure, _, ends in looks])
        # No confidence reaches 2, so threshold 1 accepts nothing, and lenience never does.
        grid_G11 = np.array([2.0] * len(GRID) if self._lenient else [2.0, *GRID[1:]])[:, None, None]
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
            (self._looked_K, looked_FK.sum(axis=0)),
            (self._accepted_GK, accepted_GFK.sum(axis=1)),
            (self._drafted_GK, drafted_GFK.sum(axis=1)),
            (self._likely_GK, (drafted_GFK * right_GFK).sum(axis=1)),
            (self._ended_GK, (all_right_GFK * last_FK).sum(axis=2) @ looked_FK.astype(int)),
            (self._all_right_G, all_right_GFK.sum(axis=(1, 2))),
            (self._drafting_G, reaches_GFK.any(axis=2).sum(axis=1)),
        ):
            counts *= keep
            counts += observed

    def _fold_verified(self) -> None:
        verified, self._verified = self._verified, []
        keep, masks_K = 0.5 ** (len(verified) / HALF_LIFE), np.arange(self._masks)
        sure_FK = np.array(
            [([1.0] * after + sure + [0.0] * self._masks)[: self._masks] for after, sure, *_ in verified]
        )
        after_F1 = np.array([[after] for after, *_ in verified])
        ratio_FK = np.array(
            [([1.0] * after + ratios + [math.nan] * self._masks)[: self._masks] for after, _, ratios, _ in verified]
        )
        # Drafts after one that was not kept are not judged. Where a threshold keeps that one, their confidences tell.
        grid_G11 = np.array(GRID)[:, None, None]
        kept_GFK = np.where(np.isnan(ratio_FK), sure_FK, ratio_FK >= grid_G11).cumprod(axis=2)
        # A draft that is a stop token counts as the autoregressive token of the forward that verifies it.
        end_F1 = np.array([[after + len(sure) - ends] for after, sure, _, ends in verified])
        is_draft_FK = (masks_K >= after_F1) & (masks_K < end_F1)
        self._expected_K = keep * self._expected_K + (is_draft_FK * sure_FK.cumprod(axis=1)).sum(axis=0)
        self._right_GK = keep * self._right_GK + (is_draft_FK * kept_GFK).sum(axis=1)
        self._expected_whole = keep * self._expected_whole + sum(math.prod(sure) for _, sure, *_ in verified)
        last_F = [min(after + len(sure), self._masks) - 1 for after, sure, *_ in verified]
        self._right_whole_G = keep * self._right_whole_G + kept_GFK[:, range(len(last_F)), last_F].sum(axis=1)

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


def _geometric(tokens_per_forward: float, masks: int) -> Floats:
    """Return acceptance shares [masks] that form a geometric series with the sum `tokens_per_forward` - 1."""
    from scipy.optimize import brentq  # takes half a second, and gateways, decoders and controllers do not need it

    gained = min(max(tokens_per_forward - 1, 0.0), float(masks))
    powers_K = np.arange(1, masks + 1)
    part = brentq(lambda part: float((part**powers_K).sum()) - gained, 0.0, 1.0)
    shares: Floats = part**powers_K
    return shares

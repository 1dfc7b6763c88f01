"""Estimate the tokens per forward and the agreement of every threshold from the observations of an engine.

Four kinds of observations are used: confidences at masks, outcomes of verification, audits, and the gain from text. An
audit compares tokens accepted at masks with the model's own choice one forward later. Observing needs no extra forward,
and a step only appends its observations to lists.

A block of size b has b - 1 masks. Letters: K masks, B = K + 1 block sizes, G thresholds of the grid, J judged tokens.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul, neg
from typing import Annotated

import numpy as np

from mars_ray.engine.stats.grid import GRID, KEEP_RECENT, decay
from mars_ray.engine.stats.lookahead import Floats, Lookahead, interpolate, look_ahead
from mars_ray.engine.stats.mask_readings import CALIBRATED_FORWARDS, MaskReadings
from mars_ray.engine.stats.verified_drafts import VerifiedDrafts
from mars_ray.method.drafts import DRAFT_POSITIONS, PositionPrice

FOLD_FORWARDS = 128
"""Number of forwards whose observations are added to the means in one go, once the profile is not unknown."""

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


class MaskRows:
    """Decayed counts of how forwards lay out their masks: one row behind the last token and one behind each draft."""

    def __init__(self) -> None:
        self._drafts = self._rows = 0.0
        """Drafts, and the masks that they added, the latter as fractions of the longest row."""
        self._surprised = self._void = 0.0
        """Forwards that found a wrong draft, and how many of these had no masks after the last right draft."""

    def observe(self, masks: tuple[int, ...], *, read: bool, surprised: bool) -> None:
        """Record a forward (see `Profile.observe_rows`)."""
        if drafts := len(masks) - 1:
            self._drafts = KEEP_RECENT * self._drafts + drafts
            self._rows = KEEP_RECENT * self._rows + (sum(masks) / max(masks) - 1)
        if surprised:
            self._surprised = KEEP_RECENT * self._surprised + 1
            self._void = KEEP_RECENT * self._void + (not read)

    @property
    def per_draft(self) -> float:
        """Number of masks that a draft adds, as a fraction of the longest row."""
        return self._rows / self._drafts if self._drafts else 0.0

    @property
    def unread(self) -> float:
        """Share of the forwards with a wrong draft that had no masks after the last right draft."""
        return self._void / self._surprised if self._surprised else 0.0


class TextGain:
    """Decayed sums over the forwards whose drafts could come from text."""

    def __init__(self) -> None:
        self._forwards = 0.0
        self._tokens = 0.0
        """Tokens gained by drafts from text."""
        self._positions = 0.0
        """Positions taken by drafts from text."""
        self._replaced_tokens = 0.0
        """Tokens gained by the drafts from masks that drafts from text replaced."""
        self._replaced_positions = 0.0
        """Positions of those drafts from masks."""

    def observe(self, drafts: int, right: int, replaced: Sequence[float]) -> None:
        """Record a forward (see `Profile.observe_text`)."""
        # Plain numbers, because every sequence does this in every step, and arrays would take ten times as long.
        self._forwards = KEEP_RECENT * self._forwards + 1
        self._tokens = KEEP_RECENT * self._tokens + right
        self._positions = KEEP_RECENT * self._positions + drafts
        self._replaced_tokens = KEEP_RECENT * self._replaced_tokens + sum(accumulate(replaced, mul))
        self._replaced_positions = KEEP_RECENT * self._replaced_positions + len(replaced)

    def by_block(self, blocks: int) -> Floats:
        """Return the tokens and the positions that text adds to an average forward, as [2, blocks]."""
        text_2 = np.array([self._tokens, self._positions])
        replaced_2 = np.array([self._replaced_tokens, self._replaced_positions])
        # Without masks there are no drafts from masks to replace.
        gain_2B: Floats = text_2[:, None] - np.outer(replaced_2, np.arange(blocks) > 0)
        return gain_2B / max(1.0, self._forwards)


class Audits:
    """Decayed counts of audited tokens at each threshold."""

    def __init__(self) -> None:
        self._new: list[tuple[float, list[float], list[bool]]] = []
        self.audited_G: Floats = np.zeros(len(GRID))
        """Tokens that were judged."""
        self.agreed_G: Floats = np.zeros(len(GRID))
        """Tokens among them that equal the model's own choice."""

    def observe(self, threshold: float, confidences: list[float], right: list[bool]) -> None:
        """Record an audit (see `Profile.observe_audit`)."""
        self._new.append((threshold, confidences, right))

    def fold(self) -> None:
        """Add the new audits to the counts."""
        new, self._new = self._new, []
        keep = decay(len(new))
        self.audited_G *= keep
        self.agreed_G *= keep
        grid_G1 = np.array(GRID)[:, None]
        for threshold, confidences, right in new:
            judged = min(len(confidences), len(right))
            least_J = np.minimum.accumulate(np.array(confidences[:judged], dtype=float))
            counts_GJ = (least_J >= grid_G1) & (grid_G1 >= threshold)
            self.audited_G += counts_GJ.sum(axis=1)
            self.agreed_G += (counts_GJ & np.array(right[:judged], dtype=bool)).sum(axis=1)


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
        self._readings = MaskReadings(masks, lenient=lenient)
        self._verified = VerifiedDrafts(masks)
        self._rows = MaskRows()
        self._text = TextGain()
        self._audits = Audits()
        self._readings.calibrate(calibration or {})

    @property
    def block(self) -> int:
        """Largest block that is observed."""
        return self._masks + 1

    @property
    def lenient(self) -> bool:
        """Whether thresholds apply to drafts."""
        return self._readings.lenient

    def widen(self, block: int, calibration: Mapping[float, tuple[float, float]], *, lenient: bool) -> None:
        """Observe blocks of up to `block` tokens, too. A profile without observations starts from `calibration`."""
        if block > self.block:
            self._fold()
            self._masks = block - 1
            self._readings.widen(self._masks, lenient=lenient)
            self._verified.widen(self._masks)
        if not self.forwards and not self._readings.new:
            self._readings.calibrate(calibration)

    def forget(self, calibration: Mapping[float, tuple[float, float]]) -> None:
        """Forget all observations and start again from `calibration`."""
        Profile.__init__(self, self.block, calibration, lenient=self.lenient)

    @property
    def forwards(self) -> float:
        """Decayed number of observed forwards."""
        return self._readings.forwards

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
        self._readings.observe(looked, confidences, price, ends)
        new = self._readings.new
        if new >= FOLD_FORWARDS or (new >= CALIBRATED_FORWARDS and self.unknown):
            self._fold()

    def observe_drafts(
        self, confidences: list[float], ratios: list[float], *, after: int = 0, ends: bool = False
    ) -> None:
        """Record verified drafts that follow `after` accepted tokens at masks.

        `ratios` are those of the drafts up to the first that was not kept: 1 for a right one (see `Verification`).
        `ends` means that the last draft is a stop token.
        """
        self._verified.observe(after, confidences, ratios, ends)

    def observe_rows(self, masks: tuple[int, ...], *, read: bool, surprised: bool) -> None:
        """Record the lengths of a forward's mask rows, whether a row was read, and whether a draft was wrong."""
        self._rows.observe(masks, read=read, surprised=surprised)

    def observe_text(self, drafts: int, right: int, replaced: Sequence[float]) -> None:
        """Record a forward with `drafts` drafts from text, perhaps 0, of which the first `right` were right.

        `replaced` are the probabilities of the drafts from masks that the text replaced.
        """
        self._text.observe(drafts, right, replaced)

    def observe_audit(self, threshold: float, confidences: list[float], right: list[bool]) -> None:
        """Record which tokens kept because of the threshold are `right`, i.e. equal the model's own choice.

        Tokens after a wrong draft are not judged. `confidences` were measured at acceptance; for drafts kept by
        lenience they are the ratios. The audit counts for `threshold` and all higher thresholds.
        """
        self._audits.observe(threshold, confidences, right)

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
            ahead = (tokens if self.lenient else float(self._masks_at(number).tokens_B[-1])) - 1
            audited = float(self._audits.audited_G[number])
            agreement = None
            if threshold >= 1:
                agreement = 1.0
            elif audited > 0:
                agreement = 1 - (1 - float(self._audits.agreed_G[number]) / audited) * ahead / tokens
            by_block = tuple(lookahead.tokens_B.tolist()), tuple(lookahead.positions_B.tolist())
            curve.append(ProfilePoint(threshold, *by_block, agreement, audited))
        return tuple(curve)

    def _at(self, number: int) -> Lookahead:
        ahead = self._masks_at(number)
        text_2B = self._text.by_block(self.block)
        return Lookahead(ahead.tokens_B + text_2B[0], ahead.positions_B + text_2B[1])

    def _masks_at(self, number: int) -> Lookahead:
        return look_ahead(*self._shares(number), rows_per_draft=self._rows.per_draft)

    def _shares(self, number: int) -> tuple[Floats, Floats, Floats]:
        """Return the shares of forwards that accept, draft, and draft correctly at each mask (see `look_ahead`)."""
        readings = self._readings
        whole = self._verified.truth_of_whole(number)
        surprises = max(0.0, readings.drafting_G[number] - whole * readings.all_right_G[number])
        unread = surprises * self._rows.unread
        forwards_K = np.maximum(readings.looked_K + whole * readings.ended_GK[number] + unread, 1e-9)
        drafted_K = readings.drafted_GK[number] / forwards_K
        right_K = np.minimum(readings.likely_GK[number] / forwards_K * self._verified.truth(number), drafted_K)
        return readings.accepted_GK[number] / forwards_K, drafted_K, right_K

    def _fold(self) -> None:
        self._readings.fold()
        self._verified.fold()
        self._audits.fold()
